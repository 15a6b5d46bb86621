"""Flat storages: one tensor whose bytes come and go.

Note [One storage, bytes that come and go]
    A group's parameters are views into one flat tensor. Tensors that autograd saved in forward alias its storage, so
    it is enough to refill that storage before backward: nothing in the graph needs to know. Resharding takes the bytes
    away, unsharding brings them back, and the views never change. Without its bytes a storage on a CPU shows NaN: see
    nowhere.py.

    On a CPU the storage takes its bytes from an arena lease by exchanging data pointers (0.1 us), and NVMe reads land
    in the lease directly. Elsewhere, and where torch lacks the exchange, the storage is resized to zero and back and
    filled by a copy.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from tiering.arena import Arena, Lease
from tiering.tickets import Transfer
from zero3.tiers import Entry, Home, Tiers, as_tensor

log = logging.getLogger(__name__)

FETCH_PRIORITY = 1  # a parameter that compute waits for goes before write-back


class FlatStorage(ABC):
    """A flat tensor whose bytes arrive with ``start``/``finish`` and go with ``drop``."""

    flat: Tensor

    def take_bytes(self) -> None:
        """The views are made: from now on the storage has no bytes of its own."""
        self.flat.untyped_storage().resize_(0)

    @abstractmethod
    def start(self, *, at: int | None, wait: bool) -> bool:
        """Begin to bring the bytes; False, and nothing begun, when there is no room now (``at`` a place, if given).

        With ``wait``, wait for room that transfers still hold; ArenaError if that cannot help.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until the bytes are valid and attach them to ``flat``."""

    @abstractmethod
    def drop(self) -> None:
        """Take the bytes away, whether or not they have arrived."""


class ArenaStorage(FlatStorage):
    """CPU: the storage exchanges its pointer with a lease of the working arena, once the bytes are there."""

    def __init__(self, numel: int, dtype: torch.dtype, tiers: Tiers) -> None:
        if tiers.nowhere is not None:
            self.flat = torch.frombuffer(tiers.nowhere, dtype=dtype, count=numel)
        else:
            self.flat = torch.empty(numel, dtype=dtype, device="cpu")
        self._tiers = tiers
        self._nbytes = numel * dtype.itemsize
        self._lease: Lease | None = None
        self._bytes: Tensor | None = None  # the lease as a tensor; while attached, it holds the empty pointer

    def take_bytes(self) -> None:
        if self._tiers.nowhere is None:
            super().take_bytes()

    def _take_room(self, *, at: int | None, wait: bool) -> bool:
        """Lease room for the bytes; False if there is none."""
        working, kind = self._tiers.working, "unsharded groups"
        assert isinstance(working, Arena)
        # What compute holds is given back by compute, which is waiting here: only transfers can make room.
        self._lease = (
            working.lease(self._nbytes, kind, at=at, alone=True)
            if wait
            else working.try_lease(self._nbytes, kind, at=at)
        )
        return self._lease is not None

    def _attach(self) -> None:
        assert self._lease is not None
        self._bytes = as_tensor(self._lease)
        exchange_pointers(self.flat, self._bytes)

    def _detach(self) -> Lease:
        """Undo ``_attach``, and ``_take_room`` but for the lease itself."""
        lease, self._lease = self._lease, None
        assert lease is not None
        if self._bytes is not None:
            exchange_pointers(self.flat, self._bytes)
            self._bytes = None
        return lease


class ExchangedStorage(ArenaStorage):
    """The lease is filled by an NVMe read."""

    def __init__(self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers) -> None:
        super().__init__(numel, dtype, tiers)
        self._home = home
        self._ticket: Transfer | None = None

    def start(self, *, at: int | None, wait: bool) -> bool:
        swap, extent = self._tiers.swap, self._home.extent
        assert swap is not None and extent is not None
        if not self._take_room(at=at, wait=wait):
            return False
        try:
            assert self._lease is not None
            self._ticket = swap.swap_in(extent, self._lease, priority=FETCH_PRIORITY)
        except BaseException:
            swap.settle(extent)
            self._detach().release()
            raise
        return True

    def finish(self) -> None:
        assert self._ticket is not None
        self._ticket.wait()
        self._ticket = None
        self._attach()

    def drop(self) -> None:
        lease = self._detach()
        if self._ticket is None:
            lease.release()
            return
        ticket, self._ticket = self._ticket, None
        retire_read(lease, ticket)


def retire_read(lease: Lease, ticket: Transfer) -> None:
    """Give up a lease that ``ticket`` fills. If the read has failed already, who waited for it has been told."""
    if ticket.done():
        lease.release()
    else:
        lease.retire(ticket)


class CopiedStorage(FlatStorage):
    """Device memory of its own: the storage is resized and filled by a copy from pinned host memory.

    Bytes that live on NVMe pass through a pinned lease. On a GPU the copy runs on the fetch stream, after the compute
    that may still use the allocation's memory; ``finish`` makes the compute stream wait for it, not the CPU.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, home: Home, tiers: Tiers, streams: Streams | None
    ) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=tiers.device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._home = home
        self._tiers = tiers
        self._streams = streams
        self._room: Lease | Entry | None = None
        self._lease: Lease | None = None
        self._ticket: Transfer | None = None
        self._arrived: torch.cuda.Event | None = None  # the copy in flight

    def start(self, *, at: int | None, wait: bool) -> bool:
        working, window = self._tiers.working, self._tiers.fetch_window
        room = (working.lease if wait else working.try_lease)(self._nbytes, "unsharded groups", at=at)
        if room is None:
            return False
        extent = self._home.extent
        if extent is not None:
            assert self._tiers.swap is not None
            lease = (window.lease if wait else window.try_lease)(extent.nbytes, "parameters")
            if lease is None:
                room.release()
                return False
            try:
                self._ticket = self._tiers.swap.swap_in(extent, lease, priority=FETCH_PRIORITY)
            except BaseException:
                self._tiers.swap.settle(extent)
                lease.release()
                room.release()
                raise
            self._lease = lease
        self._room = room
        if extent is None:
            self._copy_in()
        return True

    def finish(self) -> None:
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
            self._copy_in()
        self._wait_on_stream()

    def drop(self) -> None:
        assert self._room is not None
        if self._ticket is not None:
            assert self._lease is not None
            retire_read(self._lease, self._ticket)
            self._ticket = self._lease = None
        # If it is dropped before it was used: the memory goes back to the compute stream, so that one has to wait.
        self._wait_on_stream()
        self.flat.untyped_storage().resize_(0)
        self._room.release()
        self._room = None

    def _wait_on_stream(self) -> None:
        """Let the compute stream wait for this copy, not for those of groups that are fetched ahead after it."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
            self._arrived = None

    def _copy_in(self) -> None:
        source = self._home.tensor if self._lease is None else as_tensor(self._lease)
        assert source is not None
        self.flat.untyped_storage().resize_(self._nbytes)
        raw = self.flat.view(torch.uint8)
        with _unsafe_preserve_version_counter(self.flat):
            if self._streams is None:
                raw.copy_(source[: self._nbytes])
            else:
                # The allocation was made for the compute stream: order the copy after its earlier users.
                self._streams.fetch.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._streams.fetch):
                    raw.copy_(source[: self._nbytes], non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record(self._streams.fetch)
        if self._lease is not None:
            if self._streams is None:
                self._lease.release()
            else:
                self._lease.retire(StreamEvent(self._streams.fetch))
            self._lease = None


class Streams:
    """The side streams of a GPU: one per direction, so that copies run beside compute and beside each other."""

    def __init__(self) -> None:
        self.fetch = torch.cuda.Stream()
        self.offload = torch.cuda.Stream()

    def before_host_changes(self) -> None:
        """Nothing has waited for a forward without gradients: it may still read what changes in host memory now."""
        self.fetch.synchronize()


class StreamEvent:
    """What was queued on a CUDA stream so far, as a completion that a lease can retire on."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self, timeout: float | None = None) -> int:
        self._event.synchronize()
        return 0


def exchange_pointers(first: Tensor, second: Tensor) -> None:
    """Let the storages of two CPU tensors trade their memory; every view of either follows."""
    first.untyped_storage()._swap_data_ptr_(second.untyped_storage())  # type: ignore[attr-defined]


@cache
def can_exchange() -> bool:
    """Whether this torch can exchange the data pointers of two storages (a private method, so it is tried)."""
    try:
        first, second = torch.zeros(2, device="cpu"), torch.ones(2, device="cpu")
        exchange_pointers(first, second)
        works = first.tolist() == [1, 1] and second.tolist() == [0, 0]
    except (AttributeError, RuntimeError, TypeError):
        works = False
    if not works:
        log.warning(
            "torch %s cannot exchange storage pointers: unsharding on a CPU copies", torch.__version__
        )
    return works
