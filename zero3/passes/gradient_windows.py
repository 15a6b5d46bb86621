"""Windows of host memory in which the gradients of groups accumulate whose home is on NVMe.

The first gradient of a pass opens the window of a group, and fills it with the sum of earlier micro-batches. If the
plan has no room for another window, the step frees one, or the window that was opened first is written.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tiering.placement.tenants import GRADIENTS
from tiering.storage.arena import Lease
from zero3.device.home import Home
from zero3.device.storages import as_tensor
from zero3.device.tiers import Tiers
from zero3.params.param_group import ParamGroup


class Stepper(Protocol):
    """Updates parameters with the gradients in the windows, group by group."""

    def make_room(self) -> bool:
        """Step a tile whose gradients may hold a window; False if no tile is due."""


class GradientWindows:
    """The windows of groups whose gradients have ``homes``, in the order of groups."""

    def __init__(self, homes: list[Home], tiers: Tiers) -> None:
        self._homes = homes
        self._tiers = tiers
        self._windows: dict[ParamGroup, Lease] = {}
        # Their extents hold gradients of this accumulation.
        self._written_groups: set[ParamGroup] = set()
        self._stepper: Stepper | None = None

    def register_stepper(self, stepper: Stepper) -> None:
        """``stepper`` uses the gradients. It is called to free a window if there is no room for another one."""
        self._stepper = stepper

    @property
    def open_groups(self) -> list[ParamGroup]:
        """The groups with an open window; the one that was opened first comes first."""
        return list(self._windows)

    def address(self, group: ParamGroup) -> int:
        """Address of the group's gradients in host memory, 0 if they are on NVMe."""
        home, window = self._homes[group.index], self._windows.get(group)
        return window.address if window is not None else home.address

    def open(self, group: ParamGroup) -> Tensor:
        """The group's gradients in memory, as bytes: at their home, or in its window.

        Waits for room for the window, and for the read of earlier gradients.
        """
        home, lease = self._homes[group.index], self._windows.get(group)
        if home.tensor is not None:
            return home.tensor
        if lease is None:
            assert home.extent is not None and self._tiers.swap is not None
            with self._tiers.stalls.waiting_for(GRADIENTS):
                window = self._tiers.windows[GRADIENTS]
                while (lease := window.try_lease(home.extent.nbytes, GRADIENTS)) is None:
                    if self._stepper is not None and self._stepper.make_room():
                        continue
                    if not self._windows:
                        break
                    # More groups are open than the plan has room for: write the one that was opened first.
                    self.write_out(next(iter(self._windows)))
                lease = lease or window.lease(home.extent.nbytes, GRADIENTS)
                if group in self._written_groups:
                    # Waits, because the next gradient is added to these bytes. The extent orders the read behind the
                    # write of the same window.
                    self._tiers.fetch(home.extent, lease)
            # Only now: after an exception above, ``fetch`` has released the lease.
            self._windows[group] = lease
        return as_tensor(lease)

    def write_out(self, group: ParamGroup) -> None:
        """Start to write the group's window, if it is open, to the extent. The window is closed."""
        lease = self._windows.pop(group, None)
        if lease is None:
            return
        extent, swap = self._homes[group.index].extent, self._tiers.swap
        assert extent is not None and swap is not None
        try:
            ticket = swap.swap_out(extent, lease, nbytes=extent.nbytes)
        except BaseException:
            # Ctrl-C may have come after the write was submitted: wait for it before the memory is used again.
            swap.settle(extent)
            lease.release()
            raise
        # The write reads the window until the ticket is done.
        lease.retire(ticket)
        self._written_groups.add(group)

    def note_written(self, group: ParamGroup) -> None:
        """Gradients were written to the group's extent, if it has one, without its window."""
        if self._homes[group.index].extent is not None:
            self._written_groups.add(group)

    def check_written(self) -> None:
        """Wait until all gradients that were written are in swap space; raises the SwapError of a write that failed."""
        for group in self._written_groups:
            extent, swap = self._homes[group.index].extent, self._tiers.swap
            assert extent is not None and swap is not None
            with self._tiers.stalls.waiting_for(GRADIENTS):
                swap.check_whole(extent)

    def drop(self, group: ParamGroup) -> None:
        """The group's gradients were used, or are at home: release its window without a write."""
        window = self._windows.pop(group, None)
        if window is not None:
            # Released and not retired: no transfer uses it.
            window.release()

    def reset(self) -> None:
        """Forget all gradients."""
        # Each is forgotten before it is released: a second Ctrl-C is not deferred, and no gradient may be written to a
        # window that somebody else has.
        while self._windows:
            self._windows.popitem()[1].release()
        self._written_groups.clear()
