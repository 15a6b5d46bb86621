"""Free ranges of a linear space, first fit, merged when neighbours meet. Used by the arena and by the slab file."""

from __future__ import annotations

from bisect import bisect


class FreeRanges:
    """The free part of [0, ``size``). Not thread-safe: the owner holds its lock."""

    def __init__(self, size: int) -> None:
        self._ranges: list[tuple[int, int]] = [(0, size)] if size else []  # sorted (start, end)

    def allocate(self, size: int, *, at: int | None = None) -> int | None:
        """Allocate a range of ``size``: the first that fits, or the range ``at`` an offset. Returns its start.

        None if no range fits, or the range at the offset is not free.
        """
        for index, (start, end) in enumerate(self._ranges):
            first = start if at is None else at
            if first < start or first + size > end:
                continue
            remaining = [(start, first), (first + size, end)]
            self._ranges[index : index + 1] = [part for part in remaining if part[0] < part[1]]
            return first
        return None

    def free(self, start: int, size: int) -> None:
        """Make [start, start + size) free again."""
        end = start + size
        index = bisect(self._ranges, (start, end))
        before = self._ranges[index - 1] if index else None
        after = self._ranges[index] if index < len(self._ranges) else None
        assert (before is None or before[1] <= start) and (after is None or end <= after[0]), "freed twice"
        first, last = index, index
        if before is not None and before[1] == start:
            start, first = before[0], index - 1
        if after is not None and after[0] == end:
            end, last = after[1], index + 1
        self._ranges[first:last] = [(start, end)]

    @property
    def largest(self) -> int:
        """Size of the largest free range."""
        return max((end - start for start, end in self._ranges), default=0)
