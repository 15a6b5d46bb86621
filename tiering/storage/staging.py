"""The staging pipeline: the tile in each staging slot, the next reads, and when a slot becomes free.

The optimizer step of the engine and its replay in ``tierbench profile`` use this one implementation. It decides when
the bytes of a tile move; a `TileTransfers` moves them. Not thread-safe: one thread runs the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tiering.storage.arena import Arena, Completion, Lease
from tiering.storage.tickets import AllOf

SLOT = "staging"  # the kind of the leases


class GroupMember(Hashable, Protocol):
    """A tile: a part of one group, whose gradients become final all at once."""

    @property
    def group(self) -> Hashable: ...


TileT = TypeVar("TileT", bound=GroupMember)
ReadT = TypeVar("ReadT", bound=Completion)


@dataclass(eq=False)
class Staged(Generic[TileT, ReadT]):
    """A tile in a staging slot, with the reads that fill the slot."""

    tile: TileT
    lease: Lease
    reads: list[ReadT] = field(default_factory=list)
    reads_gradient: bool = False


class TileTransfers(Protocol[TileT, ReadT]):
    """Moves the bytes of one tile between its homes and its slot."""

    def start_reads(self, staged: Staged[TileT, ReadT]) -> None:
        """Start the reads of bytes that do not change before the step; append each one to ``staged.reads``."""

    def start_gradient_read(self, staged: Staged[TileT, ReadT]) -> bool:
        """Start to read the final gradient, as above, before the queued reads; False if it is in memory."""
        ...

    def wait_for_reads(self, reads: Sequence[ReadT]) -> None:
        """Wait until all bytes of a tile are in its slot."""

    def before_discard(self, reads: Sequence[ReadT]) -> None:
        """Called when a tile loses its slot before its update."""

    def start_writes(self, staged: Staged[TileT, ReadT]) -> Sequence[Completion]:
        """Start to write the bytes that the update changed."""
        ...


class StagingPipeline(Generic[TileT, ReadT]):
    """Moves tiles through the staging slots, leases of ``slot_bytes`` in ``arena``.

    For each step: ``expect`` an order, call ``read_ahead`` whenever slots may have become free, report the groups whose
    gradients are ``final``, ``acquire`` each tile for its update and ``release`` it. ``waiting_for_slot`` returns the
    context that measures a wait.
    """

    def __init__(
        self,
        transfers: TileTransfers[TileT, ReadT],
        arena: Arena,
        slot_bytes: int,
        waiting_for_slot: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._transfers = transfers
        self._arena = arena
        self._slot_bytes = slot_bytes
        self._waiting_for_slot = waiting_for_slot
        self._order: Sequence[TileT] = ()
        self._position = 0  # in the order: the tiles before it are staged or were acquired
        self._staged: dict[TileT, Staged[TileT, ReadT]] = {}  # in the order in which they were staged
        self._acquired: set[TileT] = set()  # in this step
        self._final: set[Hashable] = set()  # groups

    @property
    def staged(self) -> Collection[Staged[TileT, ReadT]]:
        """The tiles that wait in their slots for their update."""
        return self._staged.values()

    def expect(self, order: Iterable[TileT]) -> None:
        """Begin a step, which will probably acquire tiles in this order."""
        # Tiles that are still staged stay: no step has changed their bytes since they were read.
        self._acquired.clear()
        self._final.clear()
        self._order, self._position = tuple(order), 0

    def expect_only(self, order: Iterable[TileT]) -> None:
        """The remaining part of the step acquires exactly these tiles."""
        self._order, self._position = tuple(order), 0
        for tile in self._staged.keys() - set(self._order):
            self._discard(tile)

    def read_ahead(self) -> None:
        """Start to read the next tiles, as far as slots are free."""
        while self._position < len(self._order):
            tile = self._order[self._position]
            if tile not in self._staged and tile not in self._acquired:
                lease = self._arena.try_lease(self._slot_bytes, SLOT)
                if lease is None:
                    return
                self._stage(tile, lease)
            # After its reads have begun: an exception above leaves the tile to the next call.
            self._position += 1

    def final(self, group: Hashable) -> None:
        """The gradients of ``group`` do not change any more before the step uses them."""
        # For tiles that are staged later; those that are staged now begin to read here.
        self._final.add(group)
        for staged in self._staged.values():
            if staged.tile.group == group:
                self._read_gradient(staged)

    def first_arrived(self, tiles: Container[TileT]) -> TileT | None:
        """The tile among ``tiles`` that was staged first, of those that ``acquire`` would return at once."""
        for tile, staged in self._staged.items():
            if tile in tiles and all(read.done() for read in staged.reads):
                return tile
        return None

    def acquire(self, tile: TileT) -> Staged[TileT, ReadT]:
        """``tile`` with all its bytes, for the caller to update; its gradients are final."""
        staged = self._staged.get(tile) or self._stage(tile, self._lease_slot())
        # Its gradients are final, also if ``final`` was not called for its group.
        self._read_gradient(staged)
        self._transfers.wait_for_reads(staged.reads)
        # After the wait: if a read has failed, the tile still has its slot, and ``discard_all`` gives it back.
        del self._staged[tile]
        self._acquired.add(tile)
        return staged

    def release(self, staged: Staged[TileT, ReadT]) -> None:
        """Write an updated tile back; its slot becomes free when that has ended."""
        # Retired and not released: the writes read the slot until they have ended.
        staged.lease.retire(AllOf[Completion](self._transfers.start_writes(staged)))

    def discard_all(self) -> None:
        """Free the slots of the tiles that were read ahead, for other users; the step reads them again."""
        for tile in list(self._staged):
            self._discard(tile)
        self._position = 0

    def _lease_slot(self) -> Lease:
        """A slot for a tile that is acquired before its turn, or after all other tiles."""
        lease = self._arena.try_lease(self._slot_bytes, SLOT)
        if lease is None:
            # Staged tiles keep their slots until they are acquired: if they have all slots, a wait would not end.
            if self._staged:  # the tile that was staged last is needed last
                self._discard(next(reversed(self._staged)))
                self._position = 0
            with self._waiting_for_slot():
                lease = self._arena.lease(self._slot_bytes, SLOT)
        return lease

    def _stage(self, tile: TileT, lease: Lease) -> Staged[TileT, ReadT]:
        staged = Staged[TileT, ReadT](tile, lease)
        try:
            self._transfers.start_reads(staged)
            if tile.group in self._final:
                self._read_gradient(staged)
        except BaseException:
            # The reads that have started still fill the slot.
            lease.retire(AllOf[Completion](list(staged.reads)))
            raise
        # Only now: if a read could not begin, the tile has no slot.
        self._staged[tile] = staged
        return staged

    def _discard(self, tile: TileT) -> None:
        staged = self._staged.pop(tile)
        self._transfers.before_discard(staged.reads)
        # The reads that have begun still fill the slot.
        staged.lease.retire(AllOf[Completion](list(staged.reads)))

    def _read_gradient(self, staged: Staged[TileT, ReadT]) -> None:
        if not staged.reads_gradient:
            staged.reads_gradient = self._transfers.start_gradient_read(staged)
