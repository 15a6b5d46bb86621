"""Flat storages of a group whose parameters are sharded over the ranks: each rank fetches its shard, then all gather.

A shard is two ranges of the whole group: see layout.py. It is read, or copied, to its ranges of the whole, and gathered
from there; a shard in memory that the transport can read is gathered from its home.

Note [Gathers come in one order]
    All ranks must begin the same gathers in the same order, however fast their disks are. So the begin of a gather must
    not depend on time: ``start`` leases room and starts the read; ``gather`` is called at points of the program, which
    is the same on all ranks; and room in the working arena is released only at such points, never by a transfer.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from tiering.errors import DistributedError, SwapError
from tiering.placement.tenants import PARAMETERS
from tiering.storage.arena import Lease
from tiering.storage.read_ahead import FETCH_PRIORITY
from tiering.storage.tickets import Ticket
from zero3.device.home import Home
from zero3.device.room import room_for
from zero3.device.storages import as_tensor
from zero3.device.streams import Event
from zero3.device.tiers import Tiers
from zero3.params.flat_storage import ArenaStorage, FlatStorage, retire_read
from zero3.params.layout import FlatLayout, shard_ranges
from zero3.ranks.collectives import Collectives
from zero3.ranks.process_groups import Pending


class ShardGathers:
    """The gathers of the group ``name``: one for the trainable prefix, and one for the frozen part, if there is one.

    ``ranges`` are this rank's elements of the whole, in the order in which its shard holds them.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, collectives: Collectives, name: str) -> None:
        world = collectives.world
        whole = range(layout.trainable_numel), range(layout.trainable_numel, layout.numel)
        local = shard_ranges(layout, world.partition_size, world.partition_rank)
        # (elements of all ranks, elements of this rank) of each gather.
        self._parts = [(everything, own) for everything, own in zip(whole, local, strict=True) if own]
        self.ranges = [own for _, own in self._parts]
        # Whether a gather has begun since the storage was last started.
        self.has_begun = False
        self._itemsize = dtype.itemsize
        self._collectives = collectives
        self._label = f"gather {name!r}"
        self._under_way: list[Pending] = []

    def spare(self) -> None:
        """Count a use that needs no gather."""
        self._collectives.spare(sum(map(len, self.ranges)) * self._itemsize)

    def announce(self, *, foreseen: bool) -> None:
        """Agree with the other ranks that these gathers are next, unless all have ``foreseen`` it."""
        self._collectives.announce(self._label, foreseen=foreseen)

    def begin(self, whole: Tensor, shard: Tensor | None, after: list[Event] | None = None) -> None:
        """Gather into ``whole``, after ``announce``: from ``shard``, or with None from the ranges of ``whole``.

        On a device with streams, the gathers wait for the events in ``after``.
        """
        assert not self.has_begun
        self.has_begun = True
        base = 0
        for number, (everything, own) in enumerate(self._parts):
            if number:
                # Every rank has come to the first gather, and each begins the second one next.
                self.announce(foreseen=True)
            part = whole[own.start : own.stop] if shard is None else shard[base : base + len(own)]
            target = whole[everything.start : everything.stop]
            self._under_way.append(self._collectives.gather(target, part, self._label, after))
            base += len(own)

    def finish(self) -> None:
        """Wait for the gathers."""
        while self._under_way:
            self._collectives.finish(self._under_way[0], "gather")
            # Only after the wait: if that raises, ``end`` still finds the gather, which may be writing.
            del self._under_way[0]

    def end(self) -> list[Event] | None:
        """End the use of the gathered bytes. Returns the events after which nothing writes to their memory.

        None if the end of the writes is unknown, because another rank is lost.
        """
        self.has_begun = False
        ends = [pending.end_event for pending in self._under_way if pending.end_event is not None]
        if ends:
            self._under_way.clear()
            return ends
        try:
            self.finish()
        except DistributedError:
            # The next call that waits for another rank raises the error.
            self._under_way.clear()
            return None
        return []


class ShardedStorage(FlatStorage):
    """A storage whose shards are gathered between ``start`` and ``finish``."""

    gathers: ShardGathers

    @abstractmethod
    def gather(self, *, foreseen: bool) -> None:
        """Begin to gather, once this rank's shard is there; all ranks have ``foreseen`` that this gather is next."""


class ArenaGatheredStorage(ArenaStorage, ShardedStorage):
    """CPU: the shards are gathered into the lease."""

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, home: Home, tiers: Tiers, gathers: ShardGathers
    ) -> None:
        super().__init__(layout.numel, dtype, home, tiers)
        self.gathers = gathers
        self._dtype = dtype
        self._read = tiers.reader(home) if home.on_nvme else None
        self._reads: list[Ticket] = []

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._take_room(at=at, wait=wait):
            return False
        if self._read is not None:
            self._begin_reads(self._read)
        return True

    def gather(self, *, foreseen: bool) -> None:
        assert self._lease is not None
        # First: the transport reads this rank's shard as soon as the gather begins, and a read that has failed raises
        # before other ranks hear of the gather.
        with self._tiers.stalls.waiting_for(PARAMETERS):
            for read in self._reads:
                read.wait()
        if self._home.files is not None:
            begin = self.gathers.ranges[0].start * self._dtype.itemsize
            self._home.files.layout.arrange(self._lease.address + begin)
        self._reads.clear()
        self.gathers.announce(foreseen=foreseen)
        whole = as_tensor(self._lease)[: self._nbytes].view(self._dtype)
        shard = self._home.tensor.view(self._dtype) if self._home.tensor is not None else None
        self.gathers.begin(whole, shard)

    def finish(self) -> None:
        self.gathers.finish()
        # Only when every rank's shard is there.
        self._attach_lease()

    def drop(self) -> None:
        lease = self._detach_lease()
        # Wait, so that the room comes free here: see Note [Gathers come in one order].
        for read in self._reads:
            # A failed read has raised where it was waited for.
            with contextlib.suppress(SwapError):
                read.wait()
        self._reads.clear()
        # None: the transport may still write to the range, because a rank is lost. So it is never released.
        if self.gathers.end() is not None:
            lease.release()

    def _begin_reads(self, read: Callable[..., Ticket]) -> None:
        """Start to ``read`` the shard to its ranges of the whole."""
        itemsize = self._dtype.itemsize
        assert self._lease is not None
        offset = 0
        try:
            for elements in self.gathers.ranges:
                # A home in files is frozen, and so has one range; the pages around its bytes may land on those of other
                # ranks, which are gathered later.
                nbytes = len(elements) * itemsize + self._home.slack
                part = self._lease.part(elements.start * itemsize, nbytes)
                self._reads.append(read(part, offset=offset, priority=FETCH_PRIORITY))
                offset += part.nbytes
        except BaseException:
            # No read may fill the range after its release.
            self._tiers.settle(self._home)
            self._reads.clear()
            self._detach_lease().release()
            raise


class DeviceGatheredStorage(ShardedStorage):
    """Device memory, in which the shards are gathered.

    A shard whose home is host memory is copied to its ranges first, a shard on NVMe through a pinned lease. On a GPU
    both copies run on the fetch stream, and the gather follows them there.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, home: Home, tiers: Tiers, gathers: ShardGathers
    ) -> None:
        self._room = room_for(layout.numel, dtype, tiers, alone=False)
        self.flat = self._room.flat
        self.gathers = gathers
        self._home = home
        self._tiers = tiers
        self._read = tiers.reader(home) if home.on_nvme else None
        # The pinned memory into which the shard is read.
        self._lease: Lease | None = None
        self._ticket: Ticket | None = None
        # The end of the copy of the shard to its ranges.
        self._copied: Event | None = None

    def remove_bytes(self, name: str) -> None:
        self._room.remove_bytes(name)

    def start(self, *, at: int | None, wait: bool) -> bool:
        if not self._room.acquire(at=at, wait=wait):
            return False
        window = self._tiers.fetch_window
        if self._read is not None:
            # Half of the window for each shard, so that a second one always fits. The lease may wait for a copy, unlike
            # the room above, which alone decides whether a group is fetched ahead.
            lease = window.lease(window.capacity // 2, PARAMETERS)
            try:
                part = lease.part(0, self._home.room)
                self._ticket = self._read(part, priority=FETCH_PRIORITY)
            except BaseException:
                self._tiers.settle(self._home)
                lease.release()
                self._room.release(None)
                raise
            self._lease = lease
        return True

    def gather(self, *, foreseen: bool) -> None:
        if self._ticket is not None:
            with self._tiers.stalls.waiting_for(PARAMETERS):
                self._ticket.wait()
            self._ticket = None
        # Before any copy starts: if this raises, ``drop`` has no copy to wait for.
        self.gathers.announce(foreseen=foreseen)
        target, after = self._room.open()
        whole, home = target.view(self.flat.dtype), self._home
        if home.tensor is None or home.on_host != self._tiers.device_is_host:
            # The gather follows the last copy, which follows the others and the events in ``after``.
            self._bring_shard(whole, after)
            self.gathers.begin(whole, None, after if self._copied is None else [self._copied])
            return
        if self._tiers.streams is not None:
            # Compute may have updated the shard.
            after.append(self._tiers.streams.compute.record())
        self.gathers.begin(whole, home.tensor.view(self.flat.dtype), after)

    def finish(self) -> None:
        self.gathers.finish()
        # Compute waits for the gather, which came behind the copy.
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
        # Gathers run on one stream: behind the last one, nothing writes here. Without an end, see above, the room stays
        # leased.
        if ends is not None:
            self._room.release(ends[-1] if ends else copied)

    def _bring_shard(self, whole: Tensor, after: list[Event]) -> None:
        """Copy this rank's shard to its ranges of ``whole``, after the events in ``after``."""
        home = self._home.tensor
        if home is None:
            assert self._lease is not None
            home = as_tensor(self._lease)
        base, copies, itemsize = 0, self._tiers.copies, self.flat.dtype.itemsize
        for elements in self.gathers.ranges:
            nbytes = len(elements) * itemsize
            own = whole[elements.start : elements.stop].view(torch.uint8)
            for at, to, size in self._home.landed(nbytes):
                target, source = own[to : to + size], home[base + at : base + at + size]
                if copies is None:
                    target.copy_(source)
                else:
                    self._copied = copies.to_device(target, source, after=after, kind=PARAMETERS)
            base += nbytes
        if self._lease is not None:
            # The device reads the lease until the last copy has ended; the CPU has copied the bytes.
            if self._copied is None:
                self._lease.release()
            else:
                self._lease.retire(self._copied)
            self._lease = None
