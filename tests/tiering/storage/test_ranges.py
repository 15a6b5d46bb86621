"""FreeRanges against a bitmap that marks every free unit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiering.storage.arena import FreeRanges


class Bitmap:
    """What FreeRanges should be: one flag for each unit."""

    def __init__(self, size: int) -> None:
        self.free = [True] * size

    def fits(self, size: int) -> list[int]:
        """Every start at which ``size`` free units lie in a row."""
        return [at for at in range(len(self.free) - size + 1) if all(self.free[at : at + size])]

    def mark(self, start: int, size: int, free: bool) -> None:
        assert self.free[start : start + size] == [not free] * size
        self.free[start : start + size] = [free] * size

    def runs(self) -> list[tuple[int, int]]:
        """The maximal free runs, as (start, end)."""
        edges = [
            at
            for at in range(len(self.free) + 1)
            if (at > 0 and self.free[at - 1]) != (at < len(self.free) and self.free[at])
        ]
        return list(zip(edges[::2], edges[1::2], strict=True))


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(0, 40),
    moves=st.lists(
        st.tuples(st.booleans(), st.integers(1, 12), st.booleans(), st.integers(0, 99)), max_size=60
    ),
)
def test_like_a_bitmap(size: int, moves: list[tuple[bool, int, bool, int]]) -> None:
    ranges, bitmap = FreeRanges(size), Bitmap(size)
    model: list[tuple[int, int]] = []
    for take, amount, placed, pick in moves:
        if take or not model:
            fits = bitmap.fits(amount)
            at = pick % (size + 1) if placed else None
            start = ranges.allocate(amount, at=at)
            assert start == ((fits[0] if fits else None) if at is None else (at if at in fits else None))
            if start is not None:
                bitmap.mark(start, amount, free=False)
                model.append((start, amount))
        else:
            start, given_back = model.pop(pick % len(model))
            ranges.free(start, given_back)
            bitmap.mark(start, given_back, free=True)
        assert ranges._ranges == bitmap.runs()
        assert ranges.largest == max((end - first for first, end in bitmap.runs()), default=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_what_is_given_back_merges_in_any_order(order: tuple[int, ...]) -> None:
    ranges = FreeRanges(30)
    assert [ranges.allocate(10) for _ in range(3)] == [0, 10, 20]
    assert ranges.allocate(1) is None
    for index in order:
        ranges.free(10 * index, 10)
    assert ranges._ranges == [(0, 30)]


def test_first_fit_from_the_bottom_or_the_place_asked_for() -> None:
    ranges = FreeRanges(100)
    assert ranges.allocate(100) == 0
    for start in (10, 40, 70):
        ranges.free(start, 20)
    assert ranges.allocate(5, at=85) == 85
    assert ranges.allocate(5) == 10
    assert ranges.allocate(16) == 40  # what is left of the first, [15, 30), is one too small
    assert ranges.allocate(16, at=70) is None
    assert ranges.allocate(5, at=75) == 75
    assert ranges.allocate(5, at=73) is None
    assert ranges._ranges == [(15, 30), (56, 60), (70, 75), (80, 85)]


@pytest.mark.parametrize(("start", "size"), [(0, 10), (5, 1), (0, 1), (9, 2), (0, 30), (15, 10)])
def test_a_range_that_is_already_free_cannot_be_freed(start: int, size: int) -> None:
    ranges = FreeRanges(30)
    assert ranges.allocate(30) == 0
    ranges.free(0, 10)
    ranges.free(20, 10)
    with pytest.raises(AssertionError, match="freed twice"):
        ranges.free(start, size)
    assert ranges._ranges == [(0, 10), (20, 30)]
