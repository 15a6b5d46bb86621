"""The tiles of a weight: all of its rows, each at most as large as asked for, in whole blocks of squares."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tiering.placement.group_sizes import SQUARE_BLOCK
from tiering.placement.row_tiles import rows_of_tiles


def test_a_weight_that_is_small_enough_is_whole() -> None:
    assert rows_of_tiles(300, 100, 2, 60_000) == [300]
    assert rows_of_tiles(300, 100, 2, 0) == [300]


def test_tiles_have_whole_blocks_of_squares() -> None:
    # 1,024 rows of 100 elements are 25 blocks; 2,048 rows have 409,600 bytes.
    assert rows_of_tiles(5000, 100, 2, 600_000) == [2048, 2048, 904]
    # 1,024 rows are larger than a tile may be: 5 rows have 1,000 bytes.
    assert rows_of_tiles(5000, 100, 2, 1000) == [5] * 1000
    assert rows_of_tiles(10, 8192, 4, 3 * 32_768) == [3, 3, 3, 1]
    assert rows_of_tiles(10, 8192, 4, 6 * 32_768) == [5, 5]


@given(st.integers(1, 5000), st.integers(1, 9000), st.sampled_from([2, 4]), st.integers(1, 1 << 26))
def test_tiles_add_up(rows: int, columns: int, itemsize: int, largest: int) -> None:
    tiles = rows_of_tiles(rows, columns, itemsize, largest)
    row = columns * itemsize
    assert sum(tiles) == rows and min(tiles) > 0
    assert max(tiles) * row <= largest or max(tiles) == 1
    if len(tiles) > 1:
        assert len(set(tiles[:-1])) == 1
        quantum = SQUARE_BLOCK // math.gcd(columns, SQUARE_BLOCK)
        whole_blocks = all(tile % quantum == 0 for tile in tiles[:-1])
        assert whole_blocks or quantum * row > largest
        # Fewer tiles would be larger.
        step = quantum if quantum * row <= largest else 1
        assert (len(tiles) - 1) * (max(largest // row, 1) // step * step) < rows
