"""The flat layout of a ParamGroup: where each parameter starts, which part is a shard, how its state is tiled. Pure.

A group's parameters lie in one flat tensor of the compute dtype, those with optimizer state first, so that state,
gradients and updates cover one contiguous prefix. Each parameter starts on a 256-byte boundary. The prefix and the
frozen part after it are padded, so that every boundary, also of a shard, is a multiple of 4096 bytes in each dtype in
use. With several ranks, no shard ends inside of a block of a parameter whose squares are summed together: then the norm
of the gradients does not depend on the shards, nor on how the model is cut into groups.

A frozen parameter may keep a dtype of its own (precision.py): the flat tensor holds its bytes, and the last element
that they take may be padding in part. Its start and its length are counted in elements of the flat tensor, as for all
other parameters.

A rank's shard is an equal part of the prefix, followed by an equal part of the frozen part: two ranges of the whole,
with a layout of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

import torch
from torch import Tensor

from tiering.placement.group_sizes import shard_quantum, start_after
from tiering.storage.arena import PAGE, round_up


@dataclass(frozen=True)
class Piece:
    """One parameter inside a flat tensor: elements [start, start + numel). ``index`` counts the model's parameters.

    In a shard it may be a part of the parameter of ``shape``: ``numel`` elements, of which ``first`` is the first. With
    an ``own_dtype``, which only frozen parameters have, these are the elements of the flat tensor that hold the bytes.
    """

    index: int
    name: str
    start: int
    shape: tuple[int, ...]
    numel: int
    trainable: bool
    first: int = 0
    own_dtype: torch.dtype | None = None

    @property
    def end(self) -> int:
        return self.start + self.numel

    def own_elements(self, first: int, numel: int, itemsize: int) -> range:
        """The elements of the parameter that lie in ``numel`` elements of the flat tensor.

        ``first`` counts the elements of the flat tensor before them, from the start of the parameter; ``itemsize`` is
        their size. Without an ``own_dtype`` the result is the same range.
        """
        if self.own_dtype is None:
            return range(first, first + numel)
        own = self.own_dtype.itemsize
        return range(first * itemsize // own, min((first + numel) * itemsize // own, product(self.shape)))

    def view_of(self, flat: Tensor) -> Tensor:
        """The whole parameter as a view of the flat tensor ``flat``."""
        elements = flat[self.start : self.end]
        if self.own_dtype is not None:
            nbytes = product(self.shape) * self.own_dtype.itemsize
            elements = elements.view(torch.uint8)[:nbytes].view(self.own_dtype)
        return elements.view(self.shape)


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
        """The number of elements of the parameter before this segment."""
        return self.piece.first + self.start - self.piece.start


def lay_out(
    params: Sequence[tuple[int, str, tuple[int, ...], bool]],
    itemsize: int,
    world_size: int = 1,
    own_dtypes: Mapping[int, torch.dtype] = MappingProxyType({}),
) -> FlatLayout:
    """Lay ``params``, each (index, name, shape, trainable), out in a flat tensor of ``itemsize`` bytes an element.

    ``own_dtypes`` has the dtypes of frozen parameters that keep theirs, by index. Both the trainable prefix and the
    whole are padded to ``world_size`` equal shards of whole memory pages.
    """
    quantum = shard_quantum(world_size) * world_size
    pieces: list[Piece] = []
    offset = trainable_numel = 0
    for in_prefix in (True, False):
        for index, name, shape, trainable in params:
            if trainable is not in_prefix:
                continue
            numel, own = product(shape), own_dtypes.get(index)
            if own is not None:
                assert not trainable, f"{name!r} is trained, and its bytes are no numbers"
                numel = -(-numel * own.itemsize // itemsize)
            offset = start_after(offset, numel, itemsize, world_size)
            pieces.append(Piece(index, name, offset, shape, numel, trainable, own_dtype=own))
            offset += numel
        offset = -(-offset // quantum) * quantum
        if in_prefix:
            trainable_numel = offset
    return FlatLayout(tuple(pieces), trainable_numel, offset)


def shard_ranges(layout: FlatLayout, world_size: int, rank: int) -> tuple[range, range]:
    """The elements of a flat tensor that ``rank`` holds: a range of the prefix, and one of the frozen part."""
    ranges = []
    for begin, end in ((0, layout.trainable_numel), (layout.trainable_numel, layout.numel)):
        numel, remainder = divmod(end - begin, world_size)
        assert not remainder, f"{end - begin} elements do not divide into {world_size} shards"
        ranges.append(range(begin + rank * numel, begin + (rank + 1) * numel))
    return ranges[0], ranges[1]


def shard(layout: FlatLayout, world_size: int, rank: int, *, trainable_only: bool = False) -> FlatLayout:
    """The layout of the flat tensor in which ``rank`` keeps its shard, with the parameters of which it has a part."""
    if world_size == 1 and not trainable_only:
        return layout
    prefix, frozen = shard_ranges(layout, world_size, rank)
    parts, base = [], 0
    for elements in (prefix,) if trainable_only else (prefix, frozen):
        for segment in segments(layout.pieces, elements.start, elements.stop):
            start = base + segment.start - elements.start
            parts.append(replace(segment.piece, start=start, numel=segment.numel, first=segment.first))
        base += len(elements)
    return FlatLayout(tuple(parts), len(prefix), base)


def tiles(numel: int, tile: int) -> Iterator[tuple[int, int]]:
    """Cut [0, numel) into sub-groups of ``tile`` elements; the last may be shorter."""
    for start in range(0, numel, tile):
        yield start, min(start + tile, numel)


def segments(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Segment]:
    """The parts of ``pieces``, which are in flat order, inside the flat range [start, end), without padding."""
    before = bisect.bisect_right(pieces, start, key=attrgetter("start"))
    for number in range(max(0, before - 1), len(pieces)):
        piece = pieces[number]
        if piece.start >= end:
            break
        first, last = max(piece.start, start), min(piece.end, end)
        if first < last:
            yield Segment(piece, first, last - first)


@dataclass(frozen=True)
class ExpertSlice:
    """An expert of a parameter [experts, ...]: ``piece`` in the flat tensor of whole ``pages``, bytes of the group."""

    piece: Piece
    pages: range


def expert_slices(layout: FlatLayout, itemsize: int, experts: int) -> list[list[ExpertSlice]]:
    """For each of ``experts``, the slices of all parameters of ``layout``, whose elements have ``itemsize`` bytes."""
    return [
        [_expert_slice(piece, itemsize, expert, experts) for piece in layout.pieces]
        for expert in range(experts)
    ]


def _expert_slice(piece: Piece, itemsize: int, expert: int, experts: int) -> ExpertSlice:
    own = itemsize if piece.own_dtype is None else piece.own_dtype.itemsize
    nbytes = product(piece.shape) * own // experts
    first = piece.start * itemsize + expert * nbytes
    pages = range(first // PAGE * PAGE, round_up(first + nbytes))
    start, remainder = divmod(first - pages.start, itemsize)
    assert not remainder, f"an expert of {piece.name!r} begins inside an element"
    numel, name = -(-nbytes // itemsize), f"{piece.name}[{expert}]"
    return ExpertSlice(replace(piece, name=name, start=start, shape=piece.shape[1:], numel=numel), pages)


def in_elements_of(dtype: torch.dtype, values: Tensor) -> Tensor:
    """The bytes of ``values``, which are flat and in host memory, as elements of ``dtype``, padded with zeros."""
    raw = values.contiguous().view(torch.uint8)
    padding = -raw.numel() % dtype.itemsize
    if padding or raw.storage_offset() % dtype.itemsize:
        raw = torch.cat((raw, raw.new_zeros(padding)))
    return raw.view(dtype)


def product(shape: Sequence[int]) -> int:
    """The number of elements of a tensor of ``shape`` (1 for a scalar)."""
    result = 1
    for size in shape:
        result *= size
    return result
