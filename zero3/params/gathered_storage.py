"""Flat storages of a group whose parameters are sharded over the ranks: each brings its own shard, and all gather.

A shard is two ranges of the whole: see layout.py. It is read, or copied, to its place in the whole, and gathered
from there; a shard in memory that the transport can read is gathered from its home.

Note [Gathers come in one order]
    All ranks have to begin the same gathers in the same order, whatever their disks do. So nothing that begins one may
    depend on time: ``start`` takes room and begins to read, ``gather`` is called where the program, which is the same
    on all ranks, is at the same place; and room in the working arena comes free only there, never behind a transfer.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod

import torch
from torch import Tensor

from tiering.errors import DistributedError, SwapError
from tiering.storage.arena import Lease
from tiering.storage.fetch_ahead import FETCH_PRIORITY
from tiering.storage.tickets import Transfer
from zero3.device.room import room_for
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers, as_tensor
from zero3.params.flat_storage import ArenaStorage, FlatStorage, retire_read
from zero3.params.layout import FlatLayout, shard_ranges
from zero3.ranks.collectives import Collectives
from zero3.ranks.process_groups import Pending


class ShardGathers:
    """The gathers of one group, ``name``: one of the trainable prefix, and one of the rest, if there is any.

    ``ranges``: this rank's elements of the whole, in the order in which its shard holds them.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, collectives: Collectives, name: str) -> None:
        world = collectives.world
        whole = range(layout.trainable_numel), range(layout.trainable_numel, layout.numel)
        ranges = shard_ranges(layout, world.size, world.rank)
        self._parts = [(all_of_it, mine) for all_of_it, mine in zip(whole, ranges, strict=True) if mine]
        self.ranges = [mine for _, mine in self._parts]
        self.begun = False  # in this stay
        self._itemsize = dtype.itemsize
        self._collectives = collectives
        self._what = f"gather {name!r}"
        self._under_way: list[Pending] = []

    def spare(self) -> None:
        """Count a use for which nothing has to be gathered."""
        self._collectives.spare(sum(map(len, self.ranges)) * self._itemsize)

    def announce(self, *, foreseen: bool) -> None:
        """Agree with the other ranks that these come next, unless all have ``foreseen`` it."""
        self._collectives.announce(self._what, foreseen=foreseen)

    def begin(self, whole: Tensor, kept: Tensor | None, after: list[Event] | None = None) -> None:
        """Gather into ``whole``, from the shard ``kept``, or from its place in the whole; after ``announce``.

        On a device with streams ``after`` is what has to be over before.
        """
        assert not self.begun
        self.begun = True
        base = 0
        for number, (all_of_it, mine) in enumerate(self._parts):
            if number:
                self.announce(foreseen=True)
            shard = whole[mine.start : mine.stop] if kept is None else kept[base : base + len(mine)]
            target = whole[all_of_it.start : all_of_it.stop]
            self._under_way.append(self._collectives.gather(target, shard, self._what, after))
            base += len(mine)

    def finish(self) -> None:
        """Wait for them."""
        while self._under_way:
            self._collectives.finish(self._under_way[0], "gather")
            del self._under_way[0]

    def end(self) -> list[Event] | None:
        """Let go of what nobody needs any more: what its memory is written to until, or None if perhaps for ever."""
        self.begun = False
        ends = [pending.ended for pending in self._under_way if pending.ended is not None]
        if ends:
            self._under_way.clear()
            return ends
        try:
            self.finish()
        except DistributedError:  # whoever waits for another rank has been told, or will be
            self._under_way.clear()
            return None
        return []


class ShardedStorage(FlatStorage):
    """A storage between whose ``start`` and ``finish`` the shards are gathered."""

    gathers: ShardGathers

    @abstractmethod
    def gather(self, *, foreseen: bool) -> None:
        """Begin to gather, once this rank's shard is there; ``foreseen`` by all ranks as their next gather."""


class ArenaGatheredStorage(ArenaStorage, ShardedStorage):
    """CPU: the shards are gathered into the lease."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, home: Home, tiers: Tiers, gathers: ShardGathers
    ) -> None:
        super().__init__(layout.numel, dtype, tiers)
        self.gathers = gathers
        self._home = home
        self._dtype = dtype
        self._reads: list[Transfer] = []

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._take_room(at=at, wait=wait):
            return False
        if self._home.extent is not None:
            self._read()
        return True

    def gather(self, *, foreseen: bool) -> None:
        assert self._lease is not None
        with self._tiers.stalls.waiting_for("parameters"):
            for read in self._reads:
                read.wait()
        self._reads.clear()
        self.gathers.announce(foreseen=foreseen)
        whole = as_tensor(self._lease)[: self._nbytes].view(self._dtype)
        kept = self._home.tensor.view(self._dtype) if self._home.tensor is not None else None
        self.gathers.begin(whole, kept)

    def finish(self) -> None:
        self.gathers.finish()
        self._attach()

    def drop(self) -> None:
        lease = self._detach()
        for read in self._reads:  # see Note [Gathers come in one order]
            with contextlib.suppress(SwapError):  # who waited for it has been told
                read.wait()
        self._reads.clear()
        if self.gathers.end() is not None:
            lease.release()

    def _read(self) -> None:
        """Start to read the shard to its places in the whole."""
        swap, extent, itemsize = self._tiers.swap, self._home.extent, self._dtype.itemsize
        assert swap is not None and extent is not None and self._lease is not None
        offset = 0
        try:
            for mine in self.gathers.ranges:
                part = self._lease.part(mine.start * itemsize, len(mine) * itemsize)
                self._reads.append(swap.swap_in(extent, part, offset=offset, priority=FETCH_PRIORITY))
                offset += part.nbytes
        except BaseException:
            swap.settle(extent)
            self._reads.clear()
            self._detach().release()
            raise


class DeviceGatheredStorage(ShardedStorage):
    """Device memory, in which the shards are gathered.

    A shard at home in host memory is copied to its place first, one on NVMe by way of a pinned lease. On a GPU both run
    on the stream that fetches, and the gather behind them.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, home: Home, tiers: Tiers, gathers: ShardGathers
    ) -> None:
        self._room = room_for(layout.numel, dtype, tiers, alone=False)
        self.flat = self._room.flat
        self.gathers = gathers
        self._home = home
        self._tiers = tiers
        self._lease: Lease | None = None  # pinned, of a shard that is read
        self._ticket: Transfer | None = None
        self._copied: Event | None = None  # the shard, to its place

    def take_bytes(self, name: str) -> None:
        self._room.take_bytes(name)

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._room.take(at=at, wait=wait):
            return False
        extent, window = self._home.extent, self._tiers.fetch_window
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
                self._room.give_back(None)
                raise
            self._lease = lease
        return True

    def gather(self, *, foreseen: bool) -> None:
        if self._ticket is not None:
            with self._tiers.stalls.waiting_for("parameters"):
                self._ticket.wait()
            self._ticket = None
        # First: ``drop`` would have to wait for a copy that has begun.
        self.gathers.announce(foreseen=foreseen)
        target, after = self._room.open()
        whole, home = target.view(self.flat.dtype), self._home
        if home.tensor is None or home.on_host != self._tiers.device_is_host:
            self._bring_shard(whole, after)
            self.gathers.begin(whole, None, after if self._copied is None else [self._copied])
            return
        if self._tiers.streams is not None:  # compute has updated it, perhaps
            after.append(self._tiers.streams.compute.record())
        self.gathers.begin(whole, home.tensor.view(self.flat.dtype), after)

    def finish(self) -> None:
        self.gathers.finish()
        self._copied = None
        self._room.attach()

    def drop(self) -> None:
        if self._lease is not None:
            if self._ticket is not None:
                retire_read(self._lease, self._ticket)
            else:
                self._lease.release()
            self._ticket = self._lease = None
        copied, self._copied = self._copied, None
        ends = self.gathers.end()
        if ends is not None:
            self._room.give_back(ends[-1] if ends else copied)

    def _bring_shard(self, whole: Tensor, after: list[Event]) -> None:
        """This rank's shard, to its places in the whole."""
        home = self._home.tensor
        if home is None:
            assert self._lease is not None
            home = as_tensor(self._lease)
        kept, base, copies = home.view(self.flat.dtype), 0, self._tiers.copies
        for mine in self.gathers.ranges:
            target, source = whole[mine.start : mine.stop], kept[base : base + len(mine)]
            if copies is None:
                target.copy_(source)
            else:
                self._copied = copies.to_device(target, source, after=after, kind="parameters")
            base += len(mine)
        if self._lease is not None:
            if self._copied is None:
                self._lease.release()
            else:
                self._lease.retire(self._copied)
            self._lease = None
