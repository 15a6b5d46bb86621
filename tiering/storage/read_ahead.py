"""Reads ahead of use: of groups of parameters in the order of a pass, and of tiles of optimizer state before a step.

The engine and the replay of a step in ``tierbench profile`` use this one implementation. `FetchAhead` decides which
group is fetched and which is dropped; a `Fetcher` moves its bytes. `StagingPipeline` decides which tile is in which
staging slot, what is read next, and when a slot becomes free; a `TileTransfers` moves the bytes of a tile. Neither is
thread-safe: one thread runs a pass or a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from tiering._interrupts import atomic
from tiering.errors import SwapError
from tiering.storage.arena import Arena, Lease
from tiering.storage.request import Completion
from tiering.storage.tickets import AllOf

FETCH_PRIORITY = 1  # of reads that compute waits for: before write-back, and before reads ahead of a step
SLOT = "staging"  # the kind of the leases
FARTHEST = 64  # fetched groups in a row after which nothing is fetched ahead

GroupT = TypeVar("GroupT", bound=Hashable)
GroupIn = TypeVar("GroupIn", bound=Hashable, contravariant=True)


class Fetcher(Protocol[GroupIn]):
    """Moves one group between its home and where it computes."""

    def is_fetched(self, group: GroupIn) -> bool:
        """Whether the group is in its place for compute, or in flight to it."""
        ...

    def fetch(self, group: GroupIn, *, wait: bool) -> bool:
        """Start to fetch a group that is needed now; False if it has no room and the caller does not ``wait``."""
        ...

    def fetch_ahead(self, group: GroupIn) -> bool:
        """Start to fetch a group that is needed later; False if that has to wait. Never raises an I/O error."""
        ...

    def reads_through_window(self, group: GroupIn) -> bool:
        """Whether each fetch of the group passes through the fetch window."""
        ...

    def drop(self, group: GroupIn) -> None:
        """Free the room of a fetched group that is not in use."""


class FetchAhead(Generic[GroupT]):
    """Fetches the groups of a recorded order on demand and ahead of their use.

    ``order`` is the sequence of uses in a pass; ``cursor`` is the position after the last use, None after a use that
    the order does not have. Iteration yields the groups ahead, those needed soonest first.
    """

    def __init__(self, fetcher: Fetcher[GroupT]) -> None:
        self._fetcher = fetcher
        self.order: Sequence[GroupT] = ()
        self.cursor: int | None = 0
        self._ahead: dict[GroupT, int] = {}  # fetched and not in use, soonest first -> position in the order
        self._checked = 0  # a position: all groups between the cursor and it are ahead

    def __iter__(self) -> Iterator[GroupT]:
        return iter(self._ahead)

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def follow(self, order: Sequence[GroupT], cursor: int = 0) -> None:
        """Go on at ``cursor`` of ``order``."""
        self.order = order
        self.cursor, self._checked = cursor, 0

    @property
    def next(self) -> GroupT | None:
        """The group that the order has at the cursor."""
        return self.order[self.cursor] if self.cursor is not None and self.cursor < len(self.order) else None

    def advance(self, group: GroupT) -> bool:
        """Move the cursor behind the next use of ``group``. Returns whether that use was at the cursor."""
        if self.cursor is None:
            return False
        position = self.cursor
        try:
            self.cursor = self.order.index(group, position) + 1
        except ValueError:
            self.cursor = None
        return self.cursor == position + 1

    def use(self, group: GroupT) -> None:
        """Fetch ``group`` now. Drops groups that were fetched ahead if necessary, first the one needed last."""
        self._ahead.pop(group, None)
        while not self._fetcher.is_fetched(group):
            # Waits only when no group ahead is left that could make room.
            if self._fetcher.fetch(group, wait=not self._ahead):
                break
            # The last one, which is needed last.
            self._fetcher.drop(self._ahead.popitem()[0])
            self._checked = 0

    def keep(self, group: GroupT) -> bool:
        """Keep ``group`` after its use if it is used again before any group has to be fetched; whether it is kept."""
        if self.cursor is None:
            return False
        for position in range(self.cursor, min(len(self.order), self.cursor + FARTHEST)):
            if self.order[position] == group:
                self._ahead = {group: position, **self._ahead}
                return True
            if not self._fetcher.is_fetched(self.order[position]):
                return False
        return False

    def look_ahead(self) -> None:
        """Start to fetch the next groups of the order, as far as there is room."""
        if self.cursor is None:
            return
        position = max(self.cursor, self._checked)
        contiguous, passed = True, 0
        while position < len(self.order) and passed < FARTHEST:
            group = self.order[position]
            if not self._fetcher.is_fetched(group):
                # Nothing behind it is fetched either. It could take the room for which this group waits, and with
                # several ranks groups are gathered in the order of the pass.
                if not self._fetcher.fetch_ahead(group):
                    return
                self._ahead[group] = position
                passed = 0
            elif self._ahead.get(group) != position:
                if group not in self._ahead and self._fetcher.reads_through_window(group):
                    return  # it needs the window once more: later groups must not fill the window before it
                # The group is in use. Its next use is checked again when this use has ended.
                contiguous = False
                passed += 1
            position += 1
            if contiguous:
                self._checked = position

    def drop(self, group: GroupT) -> None:
        """Drop ``group`` if it was fetched ahead."""
        if self._ahead.pop(group, None) is not None:
            # Positions behind the cursor are checked again, because this group is no longer ahead.
            self._checked = 0
            self._fetcher.drop(group)

    def drop_all(self) -> None:
        """Drop all groups that were fetched ahead."""
        for group in self._ahead:
            self._fetcher.drop(group)
        self._ahead.clear()
        self._checked = 0


class GroupMember(Hashable, Protocol):
    """A tile: a part of one group, whose gradients become final all at once."""

    @property
    def group(self) -> Hashable: ...


TileT = TypeVar("TileT", bound=GroupMember)
ReadT = TypeVar("ReadT", bound=Completion)


@dataclass(eq=False)
class Staged(Generic[TileT, ReadT]):
    """A tile in a staging slot, with the reads that fill the slot.

    ``updated``: the slot has the only copy of the updated bytes until they are written back.
    """

    tile: TileT
    lease: Lease
    reads: list[ReadT] = field(default_factory=list)
    reads_gradient: bool = False
    updated: bool = False


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

    After an exception, of a transfer or of a signal handler, each call can be made again.
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
                self.read_gradient(staged)

    def first_arrived(self, tiles: Container[TileT]) -> TileT | None:
        """The tile among ``tiles`` that was staged first, of those that ``acquire`` would return at once."""
        for tile, staged in self._staged.items():
            if tile in tiles and all(read.done() for read in staged.reads):
                return tile
        return None

    def read_gradient(self, staged: Staged[TileT, ReadT]) -> None:
        """Start to read the gradients of the tile, which are final, unless that has begun."""
        with atomic():
            if not staged.reads_gradient:
                staged.reads_gradient = self._transfers.start_gradient_read(staged)

    def acquire(self, tile: TileT) -> Staged[TileT, ReadT]:
        """``tile`` with all its bytes, for the caller to update; its gradients are final.

        It keeps its slot until ``release``. After a failed read it has none, and is read again.
        """
        staged = self._staged.get(tile) or self._stage(tile, self._lease_slot())
        # Its gradients are final, also if ``final`` was not called for its group.
        self.read_gradient(staged)
        try:
            self._transfers.wait_for_reads(staged.reads)
        except SwapError:
            self._drop_failed(staged)
            raise
        return staged

    def release(self, staged: Staged[TileT, ReadT]) -> None:
        """Write an updated tile back; its slot becomes free when that has ended."""
        with atomic():
            # First: if a write is refused, the tile keeps its slot, and all of it is written next time.
            writes = self._transfers.start_writes(staged)
            self.hand_on(staged, None)
            # Retired and not released: the writes read the slot until they have ended.
            staged.lease.retire(AllOf(writes))

    def successors(self, count: int) -> list[TileT]:
        """The next ``count`` tiles of the order that have no slot, as far as there are any."""
        waiting = (
            tile
            for tile in self._order[self._position :]
            if tile not in self._staged and tile not in self._acquired
        )
        return list(islice(waiting, count))

    def hand_on(self, updated: Staged[TileT, ReadT], successor: Staged[TileT, ReadT] | None) -> None:
        """``updated`` is written back; ``successor``, whose reads come after the writes, has its slot from now on.

        The caller's block is atomic.
        """
        del self._staged[updated.tile]
        self._acquired.add(updated.tile)
        if successor is not None:
            self._staged[successor.tile] = successor

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
        staged: Staged[TileT, ReadT] = Staged(tile, lease)
        # Atomic: no read is lost that fills the slot.
        with atomic():
            try:
                self._transfers.start_reads(staged)
                if tile.group in self._final:
                    self.read_gradient(staged)
            except BaseException:
                # The reads that have started still fill the slot.
                lease.retire(AllOf(list(staged.reads)))
                raise
            # Only now: if a read could not begin, the tile has no slot.
            self._staged[tile] = staged
        return staged

    def _discard(self, tile: TileT) -> None:
        with atomic():
            staged = self._staged.pop(tile)
            self._transfers.before_discard(staged.reads)
            # The reads that have begun still fill the slot.
            staged.lease.retire(AllOf(list(staged.reads)))

    def _drop_failed(self, staged: Staged[TileT, ReadT]) -> None:
        """A read of the tile has failed, and the caller raises its error."""
        for read in staged.reads:
            # Not retired: the lease would raise the error once more, from a call that may have succeeded.
            with suppress(SwapError):
                self._transfers.wait_for_reads([read])
        with atomic():
            del self._staged[staged.tile]
            staged.lease.release()
            self._position = 0
