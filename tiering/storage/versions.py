"""Versions of each page of an extent (shadow paging): what a step writes does not overwrite what is kept.

Content is kept for two purposes (``Kept``): to undo a step, and as a snapshot. ``keep`` makes the current content the
kept one of a purpose. From then on a write goes to a version that is kept for no purpose, and makes it the current one
of its pages; ``go_back`` makes the content that is kept for steps the current one again. Neither moves a byte. Pages
are independent of each other, so a write of any pages needs no copy of others. One version more than there are purposes
is always enough: a page has at most one kept version for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from itertools import groupby

from tiering.storage.arena import PAGE

Ranges = tuple[tuple[int, int], ...]
"""Where the bytes of a transfer are, in their order: the first byte and the end of each range."""


Run = tuple[int, int]
"""A version, and the number of pages that follow each other and have it."""


class Kept(Enum):
    """A purpose for which content is kept."""

    # Until the next step: a step that failed, or was begun too early, goes back to it.
    STEP = "step"
    # Until the next snapshot is published.
    SNAPSHOT = "snapshot"


# Tables for bytes.translate: the lowest version that is not kept, of a version, and of 3 * one version + another.
_OTHER = bytes([1, 0, *range(2, 256)])
_THIRD = bytes([1, 2, 1, 2, 0, 0, 1, 0, 0, *range(9, 256)])


class Versions:
    """The current and the kept versions of the pages of an extent: version v of its ``nbytes`` begins at v * nbytes."""

    def __init__(self, nbytes: int, kept: Collection[Kept]) -> None:
        self._nbytes = nbytes
        self._current = bytearray(nbytes // PAGE)
        self._kept = {purpose: bytearray(nbytes // PAGE) for purpose in kept}
        # Of each page, the version to which a write goes. Found by ``keep``, so that a transfer takes a slice of it.
        self._next = self._not_kept()

    @property
    def kept(self) -> Collection[Kept]:
        """The purposes for which content is kept."""
        return self._kept.keys()

    @staticmethod
    def count(kept: Collection[Kept]) -> int:
        """How many versions of a page there are."""
        return 1 + len(kept)

    def ranges(self, start: int, end: int, *, writes: bool, kept: Kept | None = None) -> Ranges:
        """Where [start, end) is read, or is to be written. Writes are of whole pages.

        Reads are of the current content, or of what is ``kept`` for a purpose.
        """
        pages = slice(start // PAGE, -(-end // PAGE))
        source = self._current if kept is None else self._kept[kept]
        numbers = self._next[pages] if writes else source[pages]
        return tuple(self._joined(start, end, numbers))

    def _joined(self, start: int, end: int, numbers: bytes | bytearray) -> Iterator[tuple[int, int]]:
        if numbers.count(numbers[0]) == len(numbers):  # usual, and much faster
            yield numbers[0] * self._nbytes + start, numbers[0] * self._nbytes + end
            return
        page = start // PAGE
        for number, run in groupby(numbers):
            following = page + len(list(run))
            base = number * self._nbytes
            yield base + max(start, page * PAGE), base + min(end, following * PAGE)
            page = following

    def current(self, start: int, end: int) -> bytes:
        """The current version of each page of [start, end), for ``restore``."""
        return bytes(self._current[start // PAGE : end // PAGE])

    def written(self, start: int, end: int) -> None:
        """The pages of [start, end) are about to be written where ``ranges`` says."""
        pages = slice(start // PAGE, end // PAGE)
        self._current[pages] = self._next[pages]

    def restore(self, start: int, numbers: bytes) -> None:
        """A write from ``start`` on has not begun: undo ``written``."""
        self._current[start // PAGE : start // PAGE + len(numbers)] = numbers

    def keep(self, purpose: Kept) -> None:
        """Keep the current content for ``purpose``, in place of what was kept for it."""
        self._kept[purpose][:] = self._current
        self._next = self._not_kept()

    def go_back(self, start: int, end: int) -> None:
        """Make the content of [start, end) that is kept for steps the current one."""
        pages = slice(start // PAGE, -(-end // PAGE))
        self._current[pages] = self._kept[Kept.STEP][pages]

    def runs(self) -> tuple[Run, ...]:
        """The current versions of all pages, for ``restore_kept``."""
        return tuple((number, len(list(run))) for number, run in groupby(self._current))

    def restore_kept(self, runs: Iterable[Run]) -> None:
        """Make these the current versions, and the kept ones of each purpose."""
        numbers = b"".join(bytes([number]) * pages for number, pages in runs)
        assert len(numbers) == len(self._current), "a layout has the versions of all pages"
        self._current[:] = numbers
        for purpose in self._kept:
            self.keep(purpose)

    def _not_kept(self) -> bytes:
        first, *others = self._kept.values()
        if not others:
            return bytes(first.translate(_OTHER))
        # One number per page: as bytes of a large integer, of which none carries over, this takes no loop over pages.
        both = 3 * int.from_bytes(first, "little") + int.from_bytes(others[0], "little")
        return both.to_bytes(len(first), "little").translate(_THIRD)
