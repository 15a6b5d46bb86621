"""Activations that stay on the device as long as it has room for them: the policy ``auto``.

Backward uses first what was saved last. So if the tensors that stay have more bytes than the device has room, the ones
that were saved longest ago leave. That moves the least bytes that any choice could: none where all fit. It depends on
sizes and order alone, and the room is never exceeded, also in the first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from tiering.placement.workload import Tier
from zero3.device.storages import check_version
from zero3.device.tiers import Tiers
from zero3.passes.activation_copies import Moved

MARGIN = 16
"""A fraction (1/n) of a GPU's memory is left free, because torch's allocator cannot fill it without gaps."""

Move = Callable[[Tensor], Moved | None]


class Kept:
    """What autograd keeps for a saved tensor that stays: the tensor, or its copy after it has left."""

    __slots__ = ("__weakref__", "moved", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached, which shares the version: an output would hold the node that holds it.
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.moved: Moved | None = None

    def checked(self) -> Tensor:
        """The tensor, which has not left. RuntimeError if it was changed in place since it was saved."""
        assert self.tensor is not None
        check_version(self.tensor, self.version)
        return self.tensor


class _Storage:
    """A storage that stays, with the tensors in it that autograd has saved."""

    __slots__ = ("count", "key", "left", "nbytes", "saved")

    def __init__(self, key: int, nbytes: int) -> None:
        self.key = key
        self.nbytes = nbytes
        self.saved: list[_End] = []
        # Of the saved tensors, those that autograd still has.
        self.count = 0
        self.left = False


class _End(ref[Kept]):
    """Notes the end of a saved tensor: torch drops it on any thread, so the callback is a function in C."""

    __slots__ = ("storage",)
    storage: _Storage


class Room(Protocol):
    """Bytes of the device for activations that stay."""

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""

    def of(self, saved: int) -> int:
        """The room while the pass has saved ``saved`` bytes."""

    def end_backward(self, saved: int) -> None:
        """A backward has ended, of a pass that has saved ``saved`` bytes."""


class KeptActivations:
    """The saved tensors that stay in ``room``. ``move`` of its calls copies a tensor off the device."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._storages: dict[int, _Storage] = {}  # by address
        self._may_leave: dict[int, _Storage] = {}  # of these, the one that backward needs last first
        self._bytes = 0
        self._saved_bytes = 0  # in this pass
        self._ended: deque[Any] = deque()
        self._on_end: Callable[[Any], None] = self._ended.append

    @property
    def used(self) -> int:
        """Bytes that stay on the device."""
        self._forget_ended()
        return self._bytes

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""
        self._forget_ended()
        self._saved_bytes = 0
        self._room.begin_pass()

    def end_backward(self) -> None:
        """A backward has ended."""
        self._forget_ended()
        self._room.end_backward(self._saved_bytes)

    def keep(self, tensor: Tensor, move: Move) -> Kept:
        """Keep ``tensor``, which autograd saves, and move others, or itself, if the room is exceeded."""
        # First: the storage may have the address of one that was freed.
        self._forget_ended()
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = _Storage(storage._cdata, storage.nbytes())
            self._bytes += entry.nbytes
            self._saved_bytes += entry.nbytes
        kept = Kept(tensor)
        end = _End(kept, self._on_end)
        end.storage = entry
        entry.saved.append(end)
        entry.count += 1
        # Backward needs it first, also if it was saved before.
        self._may_leave.pop(entry.key, None)
        self._may_leave[entry.key] = entry
        while self._bytes > self._room.of(self._saved_bytes) and self._may_leave:
            self._leave(self._may_leave.pop(next(iter(self._may_leave))), move)
        return kept

    def _leave(self, entry: _Storage, move: Move) -> None:
        """Move a storage off the device. It stays if there is no room elsewhere."""
        for end in entry.saved:
            kept = end()
            # What was changed in place since is refused when backward asks for it: nobody needs its bytes.
            if kept is None or kept.tensor is None or kept.tensor._version != kept.version:
                continue
            kept.moved = move(kept.tensor)
            if kept.moved is None:
                return
            kept.tensor = None
        self._remove(entry)

    def _remove(self, entry: _Storage) -> None:
        entry.left = True
        del self._storages[entry.key]
        self._may_leave.pop(entry.key, None)
        self._bytes -= entry.nbytes

    def _forget_ended(self) -> None:
        while self._ended:
            entry = self._ended.popleft().storage
            entry.count -= 1
            if not entry.count and not entry.left:
                self._remove(entry)


class FixedRoom:
    """The same room for each pass."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def begin_pass(self) -> None:
        pass

    def of(self, saved: int) -> int:
        return self._nbytes

    def end_backward(self, saved: int) -> None:
        pass


class LearnedRoom:
    """What a pass leaves of a GPU's memory, ``capacity`` bytes: learned from passes in which everything was moved.

    Beside activations, a pass needs memory that grows with its tokens: the inside of a block, logits, gradients. So
    everything moves in the first pass, and from the moment when a pass has saved more than any pass before. The most
    that torch had allocated until the end of its backward (``peak``) is then what such a pass needs.
    """

    def __init__(self, capacity: int, peak: Callable[[], int]) -> None:
        self._capacity = capacity
        self._peak = peak
        self._largest = 0  # bytes that a pass has saved
        self._need = 0
        self._peak_before: int | None = None

    def begin_pass(self) -> None:
        self._peak_before = None

    def of(self, saved: int) -> int:
        if saved <= self._largest:
            return max(0, self._capacity - self._need)
        if self._peak_before is None:
            self._peak_before = self._peak()
        return 0

    def end_backward(self, saved: int) -> None:
        if self._peak_before is None or saved <= self._largest:
            return
        peak = self._peak()
        if peak > self._peak_before or not self._largest:
            self._need = peak
        else:
            # The peak is of a pass in which tensors stayed: an upper bound.
            self._need = min(self._peak_before, self._need * saved // self._largest)
        self._largest = saved
        self._peak_before = None


def room_on(tiers: Tiers, in_flight: int) -> Room:
    """The room on the device of ``tiers``. A CPU: what the plan leaves of the device budget.

    A GPU: what a pass leaves of its memory. ``in_flight``: the most bytes that are on their way off a GPU.
    """
    if tiers.device.type != "cuda":
        spare = tiers.plan.budgets.device - tiers.plan.total(Tier.DEVICE)
        return FixedRoom(max(0, spare - (in_flight if tiers.streams is not None else 0)))
    free, _ = torch.cuda.mem_get_info(tiers.device)
    capacity = free + torch.cuda.memory_reserved(tiers.device)
    peak = partial(torch.cuda.max_memory_allocated, tiers.device)
    return LearnedRoom(capacity - capacity // MARGIN - in_flight, peak)
