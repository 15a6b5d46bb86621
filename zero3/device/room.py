"""Where the bytes of an unsharded group are in device memory: a lease of the slab, or an allocation of torch's.

The slab is the usual place. Where torch cannot exchange the memory of storages, the storage is resized, and the bytes
are torch's to place: on a GPU in the pool of the stream that allocates them, among activations that come and go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tiering.storage.arena import Lease
from zero3.device.closed_storage import close_storage
from zero3.device.slab import DeviceSlab
from zero3.device.storage_swap import exchange_pointers
from zero3.device.streams import Event
from zero3.device.tiers import Ledger, LedgerEntry, Tiers

KIND = "unsharded groups"


class DeviceRoom(ABC):
    """Room for the bytes of ``flat``: ``take`` it, ``open`` it to write, ``attach`` it to use, ``give_back``.

    Until ``take_bytes`` the tensor has memory, with nothing in it, so that views of it can be made.
    """

    flat: Tensor

    @abstractmethod
    def take_bytes(self, name: str) -> None:
        """Let the tensor be without memory until ``attach``; ``name`` is what an error about a read calls it."""

    @abstractmethod
    def take(self, *, at: int | None, wait: bool) -> bool:
        """Count the room as used; False if there is none, or ArenaError with ``wait``, which helps nobody here."""

    @abstractmethod
    def open(self) -> tuple[Tensor, list[Event]]:
        """The bytes, flat, and what has to be over before they are written to."""

    @abstractmethod
    def attach(self) -> None:
        """Let the flat tensor show the bytes, which are written, as far as compute is concerned."""

    @abstractmethod
    def give_back(self, last_use: Event | None) -> None:
        """Take the bytes away and free the room, which is used until ``last_use``.

        Without it: if the bytes were attached, until compute has done what it was told so far, else no more.
        """


class SlabRoom(DeviceRoom):
    """A lease of the slab, with whose memory the storage trades its own. It never has memory beside the slab's."""

    def __init__(self, numel: int, dtype: torch.dtype, slab: DeviceSlab, tiers: Tiers) -> None:
        self._nbytes = numel * dtype.itemsize
        shown = slab.beginning(self._nbytes).untyped_storage()
        self.flat = torch.empty(0, dtype=dtype, device=tiers.device).set_(shown, 0, (numel,), (1,))
        self._slab = slab
        self._tiers = tiers
        self._lease: Lease | None = None
        self._bytes: Tensor | None = None  # of the lease; while attached, it has what the flat tensor had
        self._attached = False

    def take_bytes(self, name: str) -> None:
        exchange_pointers(self.flat, torch.empty(0, dtype=torch.uint8, device=self.flat.device))
        # After the exchange, because the mark goes with the memory: it is the empty memory that is closed. ``attach``
        # trades it for the lease, which is open, and ``give_back`` brings it back.
        close_storage(self.flat, name)

    def take(self, *, at: int | None, wait: bool) -> bool:
        # Room comes free when compute gives it back, which is waiting here: waiting would be for nothing.
        self._lease = (
            self._slab.lease(self._nbytes, KIND, at=at, alone=True)
            if wait
            else self._slab.try_lease(self._nbytes, KIND, at=at)
        )
        return self._lease is not None

    def open(self) -> tuple[Tensor, list[Event]]:
        assert self._lease is not None
        self._bytes = self._slab.tensor(self._lease)
        # The CPU has released earlier leases of this range, but the device may still compute with their bytes.
        return self._bytes[: self._nbytes], self._slab.last_uses(self._lease)

    def attach(self) -> None:
        assert self._bytes is not None
        exchange_pointers(self.flat, self._bytes)
        self._attached = True

    def give_back(self, last_use: Event | None) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        if self._attached:
            assert self._bytes is not None and self._tiers.streams is not None
            # First the storage is closed, then the event is recorded: no kernel that reads these bytes can be queued
            # behind it.
            exchange_pointers(self.flat, self._bytes)
            self._attached = False
            # Behind all kernels that may read the bytes. The next copy into this range waits for it, see
            # DeviceSlab.last_uses.
            last_use = last_use or self._tiers.streams.compute.record()
        self._bytes = None
        if last_use is None:
            # Nothing was copied here, and compute has not seen the bytes.
            lease.release()
        else:
            self._slab.release(lease, last_use)


class AllocatedRoom(DeviceRoom):
    """An allocation of torch's, counted in a ledger: the storage is resized to it and back to nothing.

    ``alone``: no other rank has to have room when this one has.
    """

    def __init__(self, numel: int, dtype: torch.dtype, ledger: Ledger, tiers: Tiers, *, alone: bool) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=tiers.device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._ledger = ledger
        self._tiers = tiers
        self._alone = alone
        self._entry: LedgerEntry | None = None

    def take_bytes(self, name: str) -> None:
        self.flat.untyped_storage().resize_(0)

    def take(self, *, at: int | None, wait: bool) -> bool:
        entry = (self._ledger.lease if wait else self._ledger.try_lease)(self._nbytes, KIND)
        if entry is None:
            return False
        try:
            self.flat.untyped_storage().resize_(self._nbytes)
        except torch.OutOfMemoryError:
            entry.release()
            if wait or not self._alone:
                raise
            return False  # what is fetched ahead makes room
        self._entry = entry
        return True

    def open(self) -> tuple[Tensor, list[Event]]:
        # The memory may be what compute has freed, and uses still.
        streams = self._tiers.streams
        return self.flat.data.view(torch.uint8), [] if streams is None else [streams.compute.record()]

    def attach(self) -> None:
        pass

    def give_back(self, last_use: Event | None) -> None:
        assert self._entry is not None
        streams = self._tiers.streams
        if streams is not None:
            # It goes back to the pool of the stream that it was allocated on, which is perhaps not this one.
            if last_use is not None:
                streams.compute.wait_for(last_use)
            # Torch's pool may give the memory to the next allocation at once. With this it waits for what compute has
            # queued, and so for ``last_use``, which compute waits for.
            streams.compute.keep(self.flat)
        self.flat.untyped_storage().resize_(0)
        self._entry.release()
        self._entry = None


def room_for(numel: int, dtype: torch.dtype, tiers: Tiers, *, alone: bool) -> DeviceRoom:
    """Room for a flat tensor, wherever the tiers have it; ``alone``: see AllocatedRoom."""
    working = tiers.working
    if isinstance(working, DeviceSlab):
        return SlabRoom(numel, dtype, working, tiers)
    assert isinstance(working, Ledger)
    return AllocatedRoom(numel, dtype, working, tiers, alone=alone)
