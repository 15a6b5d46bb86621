"""Prefetch: the order in which a pass uses groups is recorded once, then read ahead within the working room.

A pass is one forward, with its backward when there is one; passes with and without gradients have orders of their own.
Prefetch never waits and never fails: it takes room that is free, and an I/O error that it meets is raised for the next
group that compute asks for. When compute needs a group and prefetched ones hold the room, they are dropped, the one
needed last first. A pass that leaves the recorded order only stalls; the next one follows the new order.

Note [What all ranks foresee]
    Groups that are sharded over ranks must be gathered in one order everywhere (see gathered_storage.py), or a rank
    would receive another group's bytes. The recorded orders of all ranks are the same, so what they foretell is fetched
    and gathered without a word. A rank that does anything else (it leaves the order, ends a pass before its end, goes
    from training to evaluation) asks the others first, and fetches nothing ahead until they have agreed. One that does
    not know of the question waits for a gather in vain until it looks for the reason: see peers.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tiering.errors import SwapError
from zero3.params.param_group import ParamGroup, Residency

FARTHEST = 64  # groups in a row that are in use or there: what comes behind can wait


class Prefetcher:
    """Unshards groups on demand and ahead of it. ``agree`` asks all ranks whether they are about to do the same."""

    def __init__(self, agree: Callable[[str], None] = lambda what: None) -> None:
        self._agree = agree
        self._orders: dict[bool, list[ParamGroup]] = {}  # with gradients? -> the last full pass
        self._trace: list[ParamGroup] = []
        self._cursor: int | None = 0  # position in the order; None: this pass has left it
        self._training = True
        # On their way or there, not in use, soonest first -> place in the order.
        self._ahead: dict[ParamGroup, int] = {}
        self._looked = 0  # place in the order: of what lies between the cursor and it, all is ahead
        self._error: SwapError | None = None  # met while looking ahead, not raised yet
        # Of groups ahead: those that are sharded and still to be gathered, and those that stay since their last use.
        self._ungathered: deque[ParamGroup] = deque()
        self._kept: set[ParamGroup] = set()
        self._in_doubt = False  # whether the other ranks foresee what comes next

    def begin_pass(self, training: bool) -> None:
        """A forward begins. The trace of the pass before becomes the order of its kind."""
        self.end_pass()
        self._doubt_unless_complete()
        if training is not self._training:
            self._drop_ahead()
            self._in_doubt = True
        self._training = training
        self._cursor = self._looked = 0

    def end_pass(self) -> None:
        """The pass that was recorded is complete."""
        if self._trace:
            self._orders[self._training] = self._trace
            self._trace = []
            self._cursor = 0
            self._looked = 0

    def acquire(self, group: ParamGroup) -> None:
        """Make ``group`` usable now, and start what comes after it."""
        if group.residency is Residency.RESIDENT:
            return
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self._trace.append(group)
        expected = self._next()
        foreseen = self._advance(group) and not self._in_doubt
        if group.sharded:
            self._in_doubt = False  # from the agreement below on
        self._ahead.pop(group, None)
        if group in self._kept:
            self._kept.remove(group)
            if group.sharded:
                group.spare()
        while group.residency is Residency.SHARDED and self._window_is_full(group):
            self._drop_last()
        while not group.unshard(wait=not self._ahead):
            self._drop_last()
        if group.sharded:
            self._gather(group, expected, foreseen=foreseen)
        self.look_ahead()
        group.wait_for_unshard()
        self.look_ahead()

    def keeps(self, group: ParamGroup) -> bool:
        """Whether ``group`` is there since its last use, for as long as nobody needs the room."""
        return group in self._kept

    def release(self, group: ParamGroup, *, raised: bool = False) -> None:
        """``group`` is not in use now; ``raised``: an exception has ended what used it, on this rank."""
        if group.residency is Residency.RESIDENT:
            return
        if group.stays and not raised and (place := self._next_use(group)) is not None:
            group.hide()
            self._ahead = {group: place, **self._ahead}
            self._kept.add(group)
        else:
            group.reshard()
        if raised and group.sharded:
            self._in_doubt = True
        self.look_ahead()

    def look_ahead(self) -> None:
        """Start to fetch what comes next, as far as there is room; what was read goes on to the device."""
        try:
            for group in self._ahead:
                if group.through_window:
                    group.advance()
        except SwapError as error:
            self._error = error
            return
        order = self._orders.get(self._training)
        if order is None or self._cursor is None or self._in_doubt:
            return
        self._fetch_ahead(order, self._cursor)
        # The last one's bytes may be on their way still: it is gathered when there is another one behind it, or used.
        while self._ungathered and (len(self._ungathered) > 1 or not self._ungathered[0].reads_first):
            try:
                self._ungathered.popleft().gather(foreseen=True)
            except SwapError as error:
                self._error = error
                return

    def _fetch_ahead(self, order: list[ParamGroup], cursor: int) -> None:
        place = max(cursor, self._looked)
        contiguous, passed = True, 0
        while place < len(order) and passed < FARTHEST:
            group = order[place]
            if group.residency is Residency.SHARDED:
                if self._window_is_full(group):
                    return
                try:
                    if not group.unshard():
                        return
                except SwapError as error:
                    self._error = error
                    return
                self._ahead[group] = place
                if group.sharded:
                    self._ungathered.append(group)
                passed = 0
            elif self._ahead.get(group) != place:
                if group.through_window and group not in self._ahead:
                    return  # it will pass the window once more: what comes after that must not be in its way
                contiguous = False  # its next use has to be looked at again when this one is over
                passed += 1
            place += 1
            if contiguous:
                self._looked = place

    def drop(self, group: ParamGroup) -> None:
        """Drop ``group`` if it was fetched ahead: its bytes at home are about to change."""
        if group in self._ahead:
            del self._ahead[group]
            self._looked = 0
            self._give_up(group)

    def forget(self) -> None:
        """Drop what was fetched ahead: the parameters are about to change, or a pass was abandoned."""
        self._doubt_unless_complete()
        self._drop_ahead()
        self._trace = []
        self._cursor = self._looked = 0

    def _advance(self, group: ParamGroup) -> bool:
        """``group`` is used; whether that was what the recorded order has foretold."""
        order = self._orders.get(self._training, [])
        if self._cursor is None:
            return False
        before = self._cursor
        try:
            self._cursor = order.index(group, before) + 1
        except ValueError:
            self._cursor = None
        return self._cursor == before + 1

    def _next_use(self, group: ParamGroup) -> int | None:
        """The place of the next use of ``group`` in the order, if no other group has to be fetched before that."""
        order = self._orders.get(self._training, ())
        if self._cursor is None or self._in_doubt:
            return None
        for place in range(self._cursor, min(len(order), self._cursor + FARTHEST)):
            if order[place] is group:
                return place
            if order[place].residency is Residency.SHARDED:
                return None
        return None

    def _next(self) -> ParamGroup | None:
        """The group that the recorded order expects to be used next."""
        order = self._orders.get(self._training, ())
        return order[self._cursor] if self._cursor is not None and self._cursor < len(order) else None

    def _gather(self, group: ParamGroup, expected: ParamGroup | None, *, foreseen: bool) -> None:
        """Gather a group that is needed now, unless that was begun already."""
        if group.gathered:
            if not foreseen:
                instead = f" where {expected.name!r} was next" if expected not in (None, group) else ""
                self._agree(f"use {group.name!r}{instead}")
            return
        if group in self._ungathered:
            self._ungathered.remove(group)
        group.gather(foreseen=foreseen)

    def _window_is_full(self, group: ParamGroup) -> bool:
        """Whether ``group`` would wait for room that only gathers give back: the window holds two groups' shards."""
        return group.sharded and group.through_window and len(self._ungathered) > 1

    def _doubt_unless_complete(self) -> None:
        """A pass that ends before the end of its order was ended by something that other ranks need not have met."""
        if self._cursor is None or 0 < self._cursor < len(self._orders.get(self._training, ())):
            self._in_doubt = True

    def _drop_last(self) -> None:
        """Make room: drop what is needed last."""
        self._give_up(self._ahead.popitem()[0])
        self._looked = 0

    def _drop_ahead(self) -> None:
        for group in self._ahead:
            self._give_up(group)
        self._ahead.clear()
        self._looked = 0

    def _give_up(self, group: ParamGroup) -> None:
        if group in self._ungathered:
            self._ungathered.remove(group)
        self._kept.discard(group)
        group.reshard()
