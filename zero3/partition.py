"""The flat layout of a ParamGroup: where each parameter starts, what a shard is, how its state is tiled. Pure.

A group's parameters lie in one flat tensor of the compute dtype, those with optimizer state first, so that state,
gradients and updates cover one contiguous prefix. Each parameter starts on a 256-byte boundary; the prefix and the
whole are padded so that every boundary is a multiple of 4096 bytes in each dtype in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PARAM_ALIGNMENT = 256  # bytes: a multiple of every vector width, so a placement cannot change a kernel's path
QUANTUM = 2048  # elements: 4096 bytes in the smallest dtype that is stored (16 bits)


@dataclass(frozen=True)
class Piece:
    """One parameter inside a flat tensor: elements [start, start + numel). ``index`` counts the model's parameters."""

    index: int
    name: str
    start: int
    shape: tuple[int, ...]
    numel: int
    trainable: bool

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


def shard_range(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """The elements [start, end) of a flat tensor of ``numel`` (divisible by ``world_size``) that ``rank`` owns."""
    assert numel % world_size == 0, f"{numel} elements do not divide into {world_size} shards"
    each = numel // world_size
    return rank * each, (rank + 1) * each


def tiles(numel: int, tile: int) -> Iterator[tuple[int, int]]:
    """[0, numel) cut into sub-groups of ``tile`` elements; the last may be shorter."""
    for start in range(0, numel, tile):
        yield start, min(start + tile, numel)


def segments(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Segment]:
    """The parts of ``pieces`` inside the flat range [start, end), in flat order; padding is left out."""
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.end, end)
        if first < last:
            yield Segment(piece, first, last - first)


def product(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of ``shape`` (1 for a scalar)."""
    result = 1
    for size in shape:
        result *= size
    return result
