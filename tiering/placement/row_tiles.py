"""The tiles into which the weight of a large layer is cut: ranges of its rows, which are its outputs. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tiering.config.fields import format_need, format_size
from tiering.errors import ConfigError
from tiering.placement.group_sizes import SQUARE_BLOCK


def rows_of_tiles(rows: int, columns: int, itemsize: int, largest: int) -> list[int]:
    """The rows of each tile of a weight of ``rows`` x ``columns`` elements of ``itemsize`` bytes.

    It is whole if it has at most ``largest`` bytes, and always if that is 0. Otherwise no tile has more, unless a row
    does. Tiles are about equal. They have a multiple of SQUARE_BLOCK elements if ``largest`` allows it, so that no
    block of squares is in two of them: then the norm of the gradients has the bits of the whole weight.
    """
    if not largest or rows * columns * itemsize <= largest:
        return [rows]
    most = max(largest // (columns * itemsize), 1)
    quantum = SQUARE_BLOCK // math.gcd(columns, SQUARE_BLOCK)
    step = quantum if quantum <= most else 1
    count = math.ceil(rows / (most // step * step))
    each = math.ceil(rows / count / step) * step
    return [min(each, rows - start) for start in range(0, rows, each)]


def check_rows(name: str, columns: int, itemsize: int, largest: int) -> None:
    """Raises ConfigError if a row of the weight of the layer ``name`` has more than ``largest`` bytes."""
    row = columns * itemsize
    if row > largest:
        raise ConfigError(
            f"tile: a row of the weight of {name!r} has {format_size(row)}, and a tile may have {format_size(largest)};"
            f" a tile of at least {format_need(row)} can hold it"
        )


def joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of tensors of ``shapes`` as one tensor, one after the other in their first dimension."""
    first, *others = shapes
    return (sum(shape[0] for shape in shapes), *first[1:]) if others else first
