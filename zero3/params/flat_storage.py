"""Flat storages: tensors whose bytes are attached and detached.

Note [One storage, bytes that come and go]
    A group's parameters are views into one flat tensor. Tensors that autograd saved in forward alias its storage, so
    it is enough to refill that storage before backward; the graph does not change. Resharding detaches the bytes,
    unsharding attaches them again, and the views stay the same. A read of a storage without bytes raises an error: see
    storages.py. Where torch cannot raise it, the storage shows NaN on a CPU: see nan_memory.py.

    The storage gets its bytes from a lease by an exchange of data pointers (0.1 us). On a CPU it is a lease of an
    arena, into which NVMe reads go directly; on a GPU it is a lease of a slab of device memory, which a copy fills.
    Where torch lacks the exchange, the storage is resized to zero and back, and filled by a copy: see device/room.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from tiering.placement.tenants import PARAMETERS
from tiering.storage.arena import Arena, Lease
from tiering.storage.read_ahead import FETCH_PRIORITY
from tiering.storage.tickets import Abandoned, Ticket
from zero3.device.home import Home
from zero3.device.room import room_for
from zero3.device.storages import apart, as_tensor, close_storage, exchange_pointers
from zero3.device.streams import Event
from zero3.device.tiers import Tiers


class FlatStorage(ABC):
    """A flat tensor whose bytes arrive with ``start``/``finish`` and go with ``drop``."""

    flat: Tensor

    @abstractmethod
    def remove_bytes(self, name: str) -> None:
        """Free the storage's own bytes, once the views exist. Errors call the storage ``name`` from then on."""

    @abstractmethod
    def start(self, *, at: int | None, wait: bool) -> bool:
        """Start to fetch the bytes; False, with no effect, if there is no room now (at offset ``at``, if given).

        With ``wait``, wait for room that transfers still hold; ArenaError if no transfer can free enough.
        """

    def advance(self) -> None:  # noqa: B027 # most storages have nothing to do
        """Continue after ``start`` as far as possible without a wait."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the bytes are valid and attach them to ``flat``; a GPU's compute stream waits instead."""

    @abstractmethod
    def drop(self) -> None:
        """Detach the bytes, whether or not they have arrived."""


class CpuStorage(FlatStorage):
    """CPU: the storage exchanges its pointer with a tensor that has the bytes."""

    def __init__(self, numel: int, dtype: torch.dtype, tiers: Tiers) -> None:
        if tiers.nowhere is not None:
            self.flat = torch.frombuffer(tiers.nowhere, dtype=dtype, count=numel)
        else:
            self.flat = torch.empty(numel, dtype=dtype, device="cpu")
        self._tiers = tiers
        self._nbytes = numel * dtype.itemsize
        # A tensor with the bytes; while the storage has them, this tensor has the empty pointer.
        self._bytes: Tensor | None = None

    def remove_bytes(self, name: str) -> None:
        if self._tiers.nowhere is None:
            self.flat.untyped_storage().resize_(0)
        close_storage(self.flat, name)

    def _attach(self, whole: Tensor) -> None:
        """Give the storage the bytes of ``whole``, which is all of its storage."""
        self._bytes = whole
        # All views follow, also those that autograd has saved: from here on they read these bytes.
        exchange_pointers(self.flat, whole)

    def _detach(self) -> None:
        """Undo ``_attach``: a view that was kept refuses reads from here on. Nothing if there are no bytes."""
        if self._bytes is not None:
            exchange_pointers(self.flat, self._bytes)
            self._bytes = None


class HiddenStorage(CpuStorage):
    """The memory of the home itself: nothing moves, and the bytes are out of reach between uses."""

    def __init__(self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers) -> None:
        super().__init__(numel, dtype, tiers)
        assert home.tensor is not None
        self._home_bytes = home.tensor[: self._nbytes]

    def start(self, *, at: int | None, wait: bool) -> bool:
        return True

    def finish(self) -> None:
        self._attach(apart(self._home_bytes))

    def drop(self) -> None:
        self._detach()


class ArenaStorage(CpuStorage):
    """The bytes are in a lease of the working arena."""

    def __init__(self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers) -> None:
        super().__init__(numel, dtype, tiers)
        self._home = home
        # A read from files lands in more memory.
        self._lease_bytes = self._nbytes + home.slack
        self._lease: Lease | None = None

    def _take_room(self, *, at: int | None, wait: bool) -> bool:
        """Lease room for the bytes; False if there is no room."""
        working, kind = self._tiers.working, "unsharded groups"
        assert isinstance(working, Arena)
        # ``alone``: this thread is the one that releases unsharded groups, so only transfers can make room meanwhile.
        self._lease = (
            working.lease(self._lease_bytes, kind, at=at, alone=True)
            if wait
            else working.try_lease(self._lease_bytes, kind, at=at)
        )
        return self._lease is not None

    def _attach_lease(self) -> None:
        assert self._lease is not None
        # Not the slack behind the bytes, so that the storage keeps its size.
        self._attach(as_tensor(self._lease, self._nbytes))

    def _detach_lease(self) -> Lease:
        """Undo ``_attach_lease``, and return the lease, which the caller releases."""
        # Forgotten first: after an interruption, no later call may release the lease again.
        lease, self._lease = self._lease, None
        assert lease is not None
        # Before the caller releases the range: a view that was kept sees no other group's bytes.
        self._detach()
        return lease


class ExchangedStorage(ArenaStorage):
    """The lease is filled by an NVMe read."""

    def __init__(self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers) -> None:
        super().__init__(numel, dtype, home, tiers)
        self._read = tiers.reader(home)
        self._ticket: Ticket | None = None

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._take_room(at=at, wait=wait):
            return False
        try:
            assert self._lease is not None
            self._ticket = self._read(self._lease, priority=FETCH_PRIORITY)
        except BaseException:
            # A signal handler may have raised after the submission: no read may fill the range after its release.
            self._tiers.settle(self._home)
            self._detach_lease().release()
            raise
        return True

    def finish(self) -> None:
        assert self._ticket is not None
        self._ticket.wait()
        self._ticket = None
        if self._home.files is not None:
            assert self._lease is not None
            self._home.files.layout.arrange(self._lease.address)
        # Only after the read: until then the storage refuses reads.
        self._attach_lease()

    def drop(self) -> None:
        lease = self._detach_lease()
        if self._ticket is None:
            lease.release()
            return
        ticket, self._ticket = self._ticket, None
        retire_read(lease, ticket)


def retire_read(lease: Lease, ticket: Ticket) -> None:
    """Release a lease that ``ticket`` fills, once the read has ended: it is canceled, if it is not over.

    If it is over, its error was raised by ``wait``.
    """
    if ticket.done():
        lease.release()
    else:
        lease.retire(Abandoned(ticket))


class CopiedStorage(FlatStorage):
    """Device memory, filled by a copy from pinned host memory.

    Bytes that live on NVMe pass through a pinned lease; ``advance`` or ``finish`` starts the copy once the read has
    ended. On a GPU the copy runs on a separate stream; ``finish`` makes the compute stream wait for it, not the CPU.
    """

    def __init__(self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers) -> None:
        self._room = room_for(numel, dtype, tiers, alone=True)
        self.flat = self._room.flat
        self._nbytes = numel * dtype.itemsize
        self._home = home
        self._tiers = tiers
        self._read = tiers.reader(home) if home.on_nvme else None
        self._lease: Lease | None = None
        self._ticket: Ticket | None = None
        # The end of the copy in flight.
        self._arrived: Event | None = None

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._room.acquire(at=at, wait=wait):
            return False
        if self._read is None:
            self._copy_in()
            return True
        window = self._tiers.fetch_window
        lease = (window.lease if wait else window.try_lease)(self._home.room, PARAMETERS)
        if lease is None:
            # Nothing has written to the room, so it is free at once.
            self._room.release(None)
            return False
        try:
            self._ticket = self._read(lease, priority=FETCH_PRIORITY)
        except BaseException:
            # As in ExchangedStorage: no read may fill the lease after its release.
            self._tiers.settle(self._home)
            lease.release()
            self._room.release(None)
            raise
        self._lease = lease
        return True

    def remove_bytes(self, name: str) -> None:
        self._room.remove_bytes(name)

    def advance(self) -> None:
        if self._ticket is not None and self._ticket.done():
            self._finish_read()

    def finish(self) -> None:
        if self._ticket is not None:
            with self._tiers.stalls.waiting_for(PARAMETERS):
                self._finish_read()
        if self._arrived is not None:
            assert self._tiers.copies is not None
            # Kernels that are queued from here on run behind the copy.
            self._tiers.copies.hold_compute(self._arrived, PARAMETERS)
            self._arrived = None
        self._room.attach()

    def drop(self) -> None:
        if self._ticket is not None:
            assert self._lease is not None
            retire_read(self._lease, self._ticket)
            self._ticket = self._lease = None
        # If the copy was not used yet, only the copy has touched the room: the room is free when the copy ends.
        arrived, self._arrived = self._arrived, None
        self._room.release(arrived)

    def _finish_read(self) -> None:
        assert self._ticket is not None
        self._ticket.wait()
        self._ticket = None
        self._copy_in()

    def _copy_in(self) -> None:
        source = self._home.tensor if self._lease is None else as_tensor(self._lease)
        assert source is not None
        # ``after``: events behind the kernels that still use the earlier bytes of this room.
        target, after = self._room.open()
        # All copies run on one stream: the last one ends last.
        for at, to, nbytes in self._home.landed(self._nbytes):
            arriving, landed = target[to : to + nbytes], source[at : at + nbytes]
            if self._tiers.copies is None:
                arriving.copy_(landed)
            else:
                self._arrived = self._tiers.copies.to_device(arriving, landed, after=after, kind=PARAMETERS)
        if self._lease is not None:
            # The CPU has copied the bytes; a device reads the lease until its copy has ended.
            if self._arrived is None:
                self._lease.release()
            else:
                self._lease.retire(self._arrived)
            self._lease = None
