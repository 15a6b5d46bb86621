"""The tiles into which the weight of a large layer is cut: ranges of its rows, which are its outputs. Pure."""

from __future__ import annotations

import math

from tiering.placement.workload import SQUARE_BLOCK


def rows_of_tiles(rows: int, columns: int, itemsize: int, largest: int) -> list[int]:
    """The rows of each tile of a weight of ``rows`` x ``columns`` elements of ``itemsize`` bytes.

    It is whole if it has at most ``largest`` bytes, and always if that is 0. A tile has a multiple of SQUARE_BLOCK
    elements, so that no block of squares is in two of them: it has more than ``largest`` bytes if the smallest such
    multiple does. The last tile has what is left.
    """
    if not largest or rows * columns * itemsize <= largest:
        return [rows]
    quantum = SQUARE_BLOCK // math.gcd(columns, SQUARE_BLOCK)
    each = max(quantum, largest // (columns * itemsize) // quantum * quantum)
    return [min(each, rows - start) for start in range(0, rows, each)]
