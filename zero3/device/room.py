"""Device memory for the bytes of an unsharded group: a lease of the slab, or an allocation of torch.

The slab is the usual place. If torch cannot exchange the memory of storages, the storage is resized instead. Torch then
places the bytes: on a GPU in the pool of the stream that allocates them, between activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tiering.storage.arena import Lease
from zero3.device.ledger import Ledger, LedgerEntry
from zero3.device.slab import DeviceSlab
from zero3.device.storages import close_storage, exchange_pointers
from zero3.device.streams import Event
from zero3.device.tiers import Tiers

KIND = "unsharded groups"


class DeviceRoom(ABC):
    """Memory for the bytes of ``flat``. Calls come in this order: ``acquire``, ``open``, ``attach``, ``release``.

    Until ``remove_bytes`` the tensor has memory with undefined values, so that views of it can be created.
    """

    flat: Tensor

    @abstractmethod
    def remove_bytes(self, name: str) -> None:
        """Remove the memory of the tensor until ``attach``; ``name`` is its name in an error about a read."""

    @abstractmethod
    def acquire(self, *, at: int | None, wait: bool) -> bool:
        """Reserve the memory. Without room, returns False, or raises ArenaError if ``wait`` is set."""

    @abstractmethod
    def open(self) -> tuple[Tensor, list[Event]]:
        """The bytes as a flat tensor, and the events that a write to them must wait for."""

    @abstractmethod
    def attach(self) -> None:
        """Let the flat tensor show the bytes. Compute that is queued from now on runs after they were written."""

    @abstractmethod
    def release(self, last_use: Event | None) -> None:
        """Remove the bytes from the tensor and free the memory, which is used until ``last_use``.

        With None, bytes that were attached are used until all compute queued so far has run, and other bytes are not
        used any more.
        """


class SlabRoom(DeviceRoom):
    """A lease of the slab. The storage exchanges its memory with the lease, and has no other memory."""

    def __init__(self, numel: int, dtype: torch.dtype, slab: DeviceSlab, tiers: Tiers) -> None:
        self._nbytes = numel * dtype.itemsize
        storage = slab.beginning(self._nbytes).untyped_storage()
        self.flat = torch.empty(0, dtype=dtype, device=tiers.device).set_(storage, 0, (numel,), (1,))
        self._slab = slab
        self._tiers = tiers
        self._lease: Lease | None = None
        self._bytes: Tensor | None = None  # the lease; while attached, the empty memory of the flat tensor
        self._attached = False

    def remove_bytes(self, name: str) -> None:
        exchange_pointers(self.flat, torch.empty(0, dtype=torch.uint8, device=self.flat.device))
        # After the exchange, because the mark belongs to the memory: this closes the empty memory. ``attach`` exchanges
        # it for the lease, which is open, and ``release`` exchanges them again.
        close_storage(self.flat, name)

    def acquire(self, *, at: int | None, wait: bool) -> bool:
        # Only this thread frees room, by ``release``, so a wait would never end.
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

    def release(self, last_use: Event | None) -> None:
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
    """An allocation of torch, counted in a ledger: the storage is resized to its size, and later to 0.

    ``alone``: other ranks need not have room at the same time.
    """

    def __init__(self, numel: int, dtype: torch.dtype, ledger: Ledger, tiers: Tiers, *, alone: bool) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=tiers.device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._ledger = ledger
        self._tiers = tiers
        self._alone = alone
        self._entry: LedgerEntry | None = None

    def remove_bytes(self, name: str) -> None:
        self.flat.untyped_storage().resize_(0)

    def acquire(self, *, at: int | None, wait: bool) -> bool:
        entry = (self._ledger.lease if wait else self._ledger.try_lease)(self._nbytes, KIND)
        if entry is None:
            return False
        try:
            self.flat.untyped_storage().resize_(self._nbytes)
        except torch.OutOfMemoryError:
            entry.release()
            if wait or not self._alone:
                raise
            return False  # the caller drops prefetched groups to free memory
        self._entry = entry
        return True

    def open(self) -> tuple[Tensor, list[Event]]:
        # Torch may return memory that compute has freed, and that queued kernels still use.
        streams = self._tiers.streams
        return self.flat.data.view(torch.uint8), [] if streams is None else [streams.compute.record()]

    def attach(self) -> None:
        pass

    def release(self, last_use: Event | None) -> None:
        assert self._entry is not None
        streams = self._tiers.streams
        if streams is not None:
            # The memory returns to the pool of the stream on which it was allocated, which may be another stream.
            if last_use is not None:
                streams.compute.wait_for(last_use)
            # Torch's pool may use the memory for the next allocation at once. With this, it first waits for the queued
            # compute, and so for ``last_use``, which compute waits for.
            streams.compute.keep(self.flat)
        self.flat.untyped_storage().resize_(0)
        self._entry.release()
        self._entry = None


def room_for(numel: int, dtype: torch.dtype, tiers: Tiers, *, alone: bool) -> DeviceRoom:
    """Room for a flat tensor in the slab, or in a ledger if there is no slab; ``alone``: see AllocatedRoom."""
    working = tiers.working
    if isinstance(working, DeviceSlab):
        return SlabRoom(numel, dtype, working, tiers)
    assert isinstance(working, Ledger)
    return AllocatedRoom(numel, dtype, working, tiers, alone=alone)
