"""The flat layout of a ParamGroup: where each parameter starts, what a shard is, how its state is tiled. Pure.

A group's parameters lie in one flat tensor of the compute dtype, those with optimizer state first, so that state,
gradients and updates cover one contiguous prefix. Each parameter starts on a 256-byte boundary; the prefix and what
follows it are padded so that every boundary is a multiple of 4096 bytes in each dtype in use, also of a shard.

A rank's shard is its equal share of the prefix, and behind it that of the rest: two ranges of the whole, a layout of
its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

PARAM_ALIGNMENT = 256  # bytes: a multiple of every vector width, so a placement cannot change a kernel's path
QUANTUM = 2048  # elements: 4096 bytes in the smallest dtype that is stored (16 bits)


@dataclass(frozen=True)
class Piece:
    """One parameter inside a flat tensor: elements [start, start + numel). ``index`` counts the model's parameters.

    In a shard it may be a part of the parameter of ``shape``: the ``numel`` elements from its ``first`` on.
    """

    index: int
    name: str
    start: int
    shape: tuple[int, ...]
    numel: int
    trainable: bool
    first: int = 0

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """The pieces of a group in flat order; ``trainable_numel`` and ``numel`` include their padding."""

    pieces: tuple[Piece, ...]
    trainable_numel: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """The part of a piece inside a tile: flat elements [start, start + numel)."""

    piece: Piece
    start: int
    numel: int

    @property
    def first(self) -> int:
        """The elements of the parameter before it."""
        return self.piece.first + self.start - self.piece.start


def lay_out(
    params: Sequence[tuple[int, str, tuple[int, ...], bool]], itemsize: int, world_size: int = 1
) -> FlatLayout:
    """Lay ``params``, each (index, name, shape, trainable), out in a flat tensor of ``itemsize`` bytes an element.

    Both the trainable prefix and the whole are padded to ``world_size`` equal shards of whole QUANTUMs.
    """
    alignment = PARAM_ALIGNMENT // itemsize
    quantum = QUANTUM * world_size
    pieces: list[Piece] = []
    offset = trainable_numel = 0
    for wanted in (True, False):
        for index, name, shape, trainable in params:
            if trainable is not wanted:
                continue
            numel = product(shape)
            offset = -(-offset // alignment) * alignment
            pieces.append(Piece(index, name, offset, shape, numel, trainable))
            offset += numel
        offset = -(-offset // quantum) * quantum
        if wanted:
            trainable_numel = offset
    return FlatLayout(tuple(pieces), trainable_numel, offset)


def shard_ranges(layout: FlatLayout, world_size: int, rank: int) -> tuple[range, range]:
    """What ``rank`` holds of a flat tensor: a range of elements of the trainable prefix, and one of the rest."""
    shares = []
    for begin, end in ((0, layout.trainable_numel), (layout.trainable_numel, layout.numel)):
        each, left = divmod(end - begin, world_size)
        assert not left, f"{end - begin} elements do not divide into {world_size} shards"
        shares.append(range(begin + rank * each, begin + (rank + 1) * each))
    return shares[0], shares[1]


def shard(layout: FlatLayout, world_size: int, rank: int, *, trainable_only: bool = False) -> FlatLayout:
    """The layout of the flat tensor in which ``rank`` keeps its shard, with those parameters that it has a part of."""
    if world_size == 1 and not trainable_only:
        return layout
    prefix, rest = shard_ranges(layout, world_size, rank)
    parts, base = [], 0
    for share in (prefix,) if trainable_only else (prefix, rest):
        for held in segments(layout.pieces, share.start, share.stop):
            start = base + held.start - share.start
            parts.append(replace(held.piece, start=start, numel=held.numel, first=held.first))
        base += len(share)
    return FlatLayout(tuple(parts), len(prefix), base)


def tiles(numel: int, tile: int) -> Iterator[tuple[int, int]]:
    """[0, numel) cut into sub-groups of ``tile`` elements; the last may be shorter."""
    for start in range(0, numel, tile):
        yield start, min(start + tile, numel)


def segments(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Segment]:
    """The parts of ``pieces``, which are in flat order, inside the flat range [start, end); padding is left out."""
    before = bisect.bisect_right(pieces, start, key=attrgetter("start"))
    for number in range(max(0, before - 1), len(pieces)):
        piece = pieces[number]
        if piece.start >= end:
            break
        first, last = max(piece.start, start), min(piece.end, end)
        if first < last:
            yield Segment(piece, first, last - first)


def product(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of ``shape`` (1 for a scalar)."""
    result = 1
    for size in shape:
        result *= size
    return result
