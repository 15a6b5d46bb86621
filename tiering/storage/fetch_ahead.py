"""Fetching groups of parameters ahead of their use: in the order of use, as far as there is room.

The prefetcher of the engine and its replay in ``tierbench profile`` use this one implementation. It decides which group
is fetched and which is dropped; a `Fetcher` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

FETCH_PRIORITY = 1  # of reads that compute waits for: before write-back, and before reads ahead of a step
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
