"""Flat storages of a group whose parameters are sharded over the ranks: each brings its own shard, and all gather.

A shard is two ranges of the whole: see partition.py. It is read, or copied, to its place in the whole, and gathered
from there; a shard in memory that the transport can read is gathered from its home.

Note [Gathers come in one order]
    All ranks have to begin the same gathers in the same order, whatever their disks do. So nothing that begins one may
    depend on time: ``start`` takes room and begins to read, ``gather`` is called where the program, which is the same
    on all ranks, is at the same place; and room in the working arena comes free only there, never behind a transfer.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from tiering.arena import Arena, Lease
from tiering.errors import DistributedError, SwapError
from tiering.tickets import Transfer
from zero3.collectives import Collectives, Pending
from zero3.flat_storage import (
    FETCH_PRIORITY,
    FlatStorage,
    StreamEvent,
    Streams,
    exchange_pointers,
    retire_read,
)
from zero3.partition import FlatLayout, shard_ranges
from zero3.tiers import Entry, Home, Tiers, as_tensor


class GatheredStorage(FlatStorage):
    """What CPU and GPU have in common: the ranges of the shard, and gathers under way. ``name`` is the group's."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, home: Home, collectives: Collectives, name: str
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._home = home
        self._collectives = collectives
        self._name = name
        world = collectives.world
        ranges = shard_ranges(layout, world.size, world.rank)
        whole = range(layout.trainable_numel), range(layout.trainable_numel, layout.numel)
        self._shards = [(all_of_it, mine) for all_of_it, mine in zip(whole, ranges, strict=True) if len(mine)]
        self._gathers: list[Pending] = []

    def spare(self) -> None:
        self._collectives.spare(sum(len(mine) for _, mine in self._shards) * self._dtype.itemsize)

    def _begin_gathers(self, whole: Tensor, kept: Tensor | None, *, foreseen: bool) -> None:
        """Gather into ``whole``, from the shard ``kept``, or from its place in the whole."""
        assert not self.gathered
        self.gathered = True
        base = 0
        for all_of_it, mine in self._shards:
            source = whole[mine.start : mine.stop] if kept is None else kept[base : base + len(mine)]
            target = whole[all_of_it.start : all_of_it.stop]
            self._gathers.append(
                self._collectives.gather(target, source, f"gather {self._name!r}", foreseen=foreseen)
            )
            base, foreseen = base + len(mine), True

    def _finish_gathers(self) -> None:
        while self._gathers:
            self._collectives.finish(self._gathers[0], "gather")
            del self._gathers[0]

    def _end_gathers(self) -> bool:
        """Let go of gathers that nobody needs any more; False if their memory may still be written to, for ever."""
        try:
            self._finish_gathers()
        except DistributedError:  # whoever waits for another rank has been told, or will be
            self._gathers.clear()
            self.gathered = False
            return False
        self.gathered = False
        return True


class ArenaGatheredStorage(GatheredStorage):
    """CPU: the storage exchanges its pointer with an arena lease, into which the shards are gathered."""

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        home: Home,
        collectives: Collectives,
        name: str,
        tiers: Tiers,
    ) -> None:
        super().__init__(layout, dtype, home, collectives, name)
        if tiers.nowhere is not None:
            self.flat = torch.frombuffer(tiers.nowhere, dtype=dtype, count=layout.numel)
        else:
            self.flat = torch.empty(layout.numel, dtype=dtype, device="cpu")
        self._tiers = tiers
        self._lease: Lease | None = None
        self._reads: list[Transfer] = []
        self._bytes: Tensor | None = None  # the lease as a tensor; while attached, it holds the empty pointer

    def take_bytes(self) -> None:
        if self._tiers.nowhere is None:
            super().take_bytes()

    def start(self, *, at: int | None, wait: bool) -> bool:
        working = self._tiers.working
        assert isinstance(working, Arena)
        nbytes = self._layout.numel * self._dtype.itemsize
        # What compute holds is given back by compute, which is waiting here: nothing else holds any of it.
        lease = (
            working.lease(nbytes, "unsharded groups", at=at, alone=True)
            if wait
            else working.try_lease(nbytes, "unsharded groups", at=at)
        )
        if lease is None:
            return False
        self._lease = lease
        if self._home.extent is not None:
            self._read(lease)
        return True

    @property
    def reads_first(self) -> bool:
        return self._home.extent is not None

    def gather(self, *, foreseen: bool) -> None:
        assert self._lease is not None
        with self._tiers.stalls.waiting_for("parameters"):
            for read in self._reads:
                read.wait()
        self._reads.clear()
        whole = as_tensor(self._lease).view(self._dtype)[: self._layout.numel]
        kept = self._home.tensor.view(self._dtype) if self._home.tensor is not None else None
        self._begin_gathers(whole, kept, foreseen=foreseen)

    def finish(self) -> None:
        assert self._lease is not None
        self._finish_gathers()
        self._bytes = as_tensor(self._lease)
        exchange_pointers(self.flat, self._bytes)

    def drop(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        for read in self._reads:  # see Note [Gathers come in one order]
            with contextlib.suppress(SwapError):  # who waited for it has been told
                read.wait()
        self._reads.clear()
        if self._bytes is not None:
            exchange_pointers(self.flat, self._bytes)
            self._bytes = None
        if self._end_gathers():
            lease.release()

    def _read(self, lease: Lease) -> None:
        swap, extent, itemsize = self._tiers.swap, self._home.extent, self._dtype.itemsize
        assert swap is not None and extent is not None
        offset = 0
        try:
            for _, mine in self._shards:
                part = lease.part(mine.start * itemsize, len(mine) * itemsize)
                self._reads.append(swap.swap_in(extent, part, offset=offset, priority=FETCH_PRIORITY))
                offset += part.nbytes
        except BaseException:
            swap.settle(extent)
            self._reads.clear()
            self._lease = None
            lease.release()
            raise


class DeviceGatheredStorage(GatheredStorage):
    """Device memory of its own: the storage is resized, and the shards are gathered in it.

    A shard at home in host memory is copied to its place first, one on NVMe by way of a pinned lease. On a GPU both run
    on the fetch stream, behind the compute that may still use the allocation's memory.
    """

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        home: Home,
        collectives: Collectives,
        name: str,
        tiers: Tiers,
        streams: Streams | None,
    ) -> None:
        super().__init__(layout, dtype, home, collectives, name)
        self.flat = torch.empty(layout.numel, dtype=dtype, device=tiers.device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._tiers = tiers
        self._streams = streams
        self._room: Lease | Entry | None = None
        self._lease: Lease | None = None  # pinned, of a shard that is read
        self._ticket: Transfer | None = None

    @property
    def reads_first(self) -> bool:
        return self._home.extent is not None

    def start(self, *, at: int | None, wait: bool) -> bool:
        working, window = self._tiers.working, self._tiers.fetch_window
        room = (working.lease if wait else working.try_lease)(self._nbytes, "unsharded groups", at=at)
        if room is None:
            return False
        extent = self._home.extent
        if extent is not None:
            assert self._tiers.swap is not None
            # Half of it for each, so that the second always fits beside the first. This may wait for a copy: whether a
            # group is fetched ahead is for the working room alone to say.
            lease = window.lease(window.capacity // 2, "parameters")
            try:
                part = lease.part(0, extent.nbytes)
                self._ticket = self._tiers.swap.swap_in(extent, part, priority=FETCH_PRIORITY)
            except BaseException:
                self._tiers.swap.settle(extent)
                lease.release()
                room.release()
                raise
            self._lease = lease
        self._room = room
        return True

    def gather(self, *, foreseen: bool) -> None:
        if self._ticket is not None:
            with self._tiers.stalls.waiting_for("parameters"):
                self._ticket.wait()
            self._ticket = None
        self.flat.untyped_storage().resize_(self._nbytes)
        with _unsafe_preserve_version_counter(self.flat):
            if self._streams is None:
                self._gather_here(foreseen=foreseen)
                return
            self._streams.fetch.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._streams.fetch):
                self._gather_here(foreseen=foreseen)

    def finish(self) -> None:
        self._finish_gathers()

    def drop(self) -> None:
        assert self._room is not None
        if self._ticket is not None:
            assert self._lease is not None
            retire_read(self._lease, self._ticket)
            self._ticket = self._lease = None
        ended = self._end_gathers()
        if ended:
            self.flat.untyped_storage().resize_(0)
            self._room.release()
        self._room = None

    def _gather_here(self, *, foreseen: bool) -> None:
        home = self._home.tensor
        if home is not None and home.device == self.flat.device:
            self._begin_gathers(self.flat, home.view(self._dtype), foreseen=foreseen)
            return
        source = home if home is not None else as_tensor(self._pinned())
        kept, base = source[: self._layout.numel * self._dtype.itemsize].view(self._dtype), 0
        for _, mine in self._shards:
            place = self.flat[mine.start : mine.stop]
            place.copy_(kept[base : base + len(mine)], non_blocking=True)
            base += len(mine)
        if self._lease is not None:
            if self._streams is None:
                self._lease.release()
            else:
                self._lease.retire(StreamEvent(self._streams.fetch))
            self._lease = None
        self._begin_gathers(self.flat, None, foreseen=foreseen)

    def _pinned(self) -> Lease:
        assert self._lease is not None
        return self._lease
