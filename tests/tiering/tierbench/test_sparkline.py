"""Lines of characters: what height they have, and when they are ASCII."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.tierbench.display.sparkline import ASCII, BLOCKS, levels, spark


@pytest.mark.parametrize(
    ("rates", "width", "line"),
    [
        ([], 8, ""),
        ([0, 0], 8, "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7.9, 8], 8, "██"),  # from zero, not from the lowest: a steady rate looks steady
        ([4, 0, 1, 3, 8, 8], 3, "▃▃█"),  # means of stretches
        ([1, 2, 3], 0, ""),
    ],
)
def test_heights(rates: list[float], width: int, line: str) -> None:
    assert spark(rates, width) == line


@given(st.lists(st.floats(0, 1e12), max_size=300), st.integers(0, 60))
def test_any_rates_fit(rates: list[float], width: int) -> None:
    line = spark(rates, width)
    assert len(line) == min(width, len(rates))
    if line and max(rates) > 0:
        assert BLOCKS[-1] in line


def test_what_an_encoding_cannot_say_is_said_in_ascii() -> None:
    assert [levels(name) for name in ("utf-8", "latin-1", "ascii", "no such")] == [
        BLOCKS,
        ASCII,
        ASCII,
        ASCII,
    ]
    wave = [1 + math.sin(index) for index in range(20)]
    line = spark(wave, 10, ASCII)
    assert line.isascii()
    assert [ASCII.index(each) for each in line] == [BLOCKS.index(each) for each in spark(wave, 10)]
