"""Prefetch: the order in which a pass uses groups is recorded once, then read ahead within the working room.

A pass is one forward, with its backward when there is one; passes with and without gradients have orders of their own.
Prefetch never waits and never fails: it takes room that is free, and an I/O error that it meets is raised for the next
group that compute asks for. When compute needs a group and prefetched ones hold the room, they are dropped, the one
needed last first. A pass that leaves the recorded order only stalls; the next one follows the new order.
"""

from __future__ import annotations

from tiering.errors import SwapError
from zero3.param_group import ParamGroup, Residency

FARTHEST = 64  # groups in a row that are in use or there: what comes behind can wait


class Prefetcher:
    """Unshards groups on demand and ahead of it."""

    def __init__(self) -> None:
        self._orders: dict[bool, list[ParamGroup]] = {}  # with gradients? -> the last full pass
        self._trace: list[ParamGroup] = []
        self._cursor: int | None = 0  # position in the order; None: this pass has left it
        self._training = True
        # On their way or there, not in use, soonest first -> place in the order.
        self._ahead: dict[ParamGroup, int] = {}
        self._looked = 0  # place in the order: of what lies between the cursor and it, all is ahead
        self._error: SwapError | None = None  # met while looking ahead, not raised yet

    def begin_pass(self, training: bool) -> None:
        """A forward begins. The trace of the pass before becomes the order of its kind."""
        self.end_pass()
        if training is not self._training:
            self._drop_ahead()
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
        self._advance(group)
        self._ahead.pop(group, None)
        while not group.unshard(wait=not self._ahead):
            self._ahead.popitem()[0].reshard()
            self._looked = 0
        self.look_ahead()
        group.wait_for_unshard()
        self.look_ahead()

    def release(self, group: ParamGroup) -> None:
        """``group`` is not in use now."""
        if group.residency is Residency.RESIDENT:
            return
        group.reshard()
        self.look_ahead()

    def look_ahead(self) -> None:
        """Start to fetch what comes next, as far as there is room."""
        order = self._orders.get(self._training)
        if order is None or self._cursor is None:
            return
        place = max(self._cursor, self._looked)
        contiguous, passed = True, 0
        while place < len(order) and passed < FARTHEST:
            group = order[place]
            if group.residency is Residency.SHARDED:
                try:
                    if not group.unshard():
                        return
                except SwapError as error:
                    self._error = error
                    return
                self._ahead[group] = place
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
            group.reshard()

    def forget(self) -> None:
        """Drop what was fetched ahead: the parameters are about to change, or a pass was abandoned."""
        self._drop_ahead()
        self._trace = []
        self._cursor = self._looked = 0

    def _advance(self, group: ParamGroup) -> None:
        order = self._orders.get(self._training, [])
        if self._cursor is None:
            return
        try:
            self._cursor = order.index(group, self._cursor) + 1
        except ValueError:
            self._cursor = None

    def _drop_ahead(self) -> None:
        for group in self._ahead:
            group.reshard()
        self._ahead.clear()
        self._looked = 0
