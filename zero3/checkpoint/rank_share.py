"""A rank's share of a checkpoint: the elements that it saves, their order, and the tensors of its files.

Each rank saves its shard of each group, and an equal part of replicated values; ranks send each other nothing. Each
kind of state has one file per rank. Frozen parameters are in the file of the weights, or in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tiering.checkpoint.manifest import WEIGHTS
from tiering.weights.tensor_file import WINDOW, TensorSpec
from zero3.building.weights import STORED_NAMES
from zero3.device.home import Home
from zero3.optimizer.tiles import Tile
from zero3.params.layout import Piece, Segment, product, segments, shard_ranges, tiles
from zero3.params.param_group import ParamGroup
from zero3.parts import Assembly

CHUNK = WINDOW // 4
"""Elements that are copied at once: in every format of state, they fit a window."""


@dataclass(frozen=True)
class Range:
    """A range of bytes of a home."""

    home: Home
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Chunk:
    """Elements of one kind of state, in ``source``; ``upper`` has the upper 16 bits of split masters.

    ``parts`` are the bytes of parameters, without padding: (first byte in the chunk, number of bytes). ``tile`` is set
    in the last chunk of a tile: once this is copied, all of it is. ``trained``: not of frozen parameters.
    """

    kind: str
    source: Range
    upper: Range | None
    parts: tuple[tuple[int, int], ...]
    tile: Tile | None = None
    trained: bool = True


class Share:
    """The part of the state that one rank saves: that of ``trained`` parameters, of ``frozen`` ones, or of both.

    ``kinds`` are the weights and the optimizer's ``state_names``. Other ranks save the tiles in ``not_here``, which are
    replicated.
    """

    def __init__(self, parts: Assembly, *, frozen: bool, trained: bool = True) -> None:
        self._world = parts.world
        self._groups = parts.groups
        self._layout = parts.layout
        self.has_frozen = frozen
        self._has_trained = trained
        self._shards_state = parts.world.partition_size > 1 and parts.plan.workload.stage >= 1
        self._tiles: dict[ParamGroup, list[Tile]] = {group: [] for group in parts.groups}
        for tile in parts.tiles:
            self._tiles[tile.group].append(tile)
        self.kinds = (WEIGHTS, *parts.optimizer.state_names)
        self.saved_elsewhere = frozenset(tile for tile in parts.tiles if not self._range(tile))

    @property
    def tiles(self) -> Iterator[Tile]:
        """All tiles, of whatever rank."""
        return (tile for of_group in self._tiles.values() for tile in of_group)

    def tensors(self, kind: str) -> tuple[list[TensorSpec], dict[str, str]]:
        """The tensors of the file of ``kind``, and its metadata: the first element of each tensor that is a part."""
        specs: list[TensorSpec] = []
        firsts: dict[str, str] = {}
        for group in self._groups:
            stored = [(segment, self._dtype(kind)) for segment in self._trained(group) if self._has_trained]
            if kind == WEIGHTS and self.has_frozen:
                stored += [(segment, group.dtype_of(segment.piece)) for segment in self._frozen(group)]
            for segment, dtype in stored:
                shape = segment.piece.shape
                own = segment.piece.own_elements(segment.first, segment.numel, group.dtype.itemsize)
                if len(own) < product(shape):
                    firsts[segment.piece.name] = str(own.start)
                    shape = (len(own),)
                specs.append(TensorSpec(segment.piece.name, STORED_NAMES[dtype], shape))
            for piece in self._empty(group):
                if self._has_trained if piece.trainable else kind == WEIGHTS and self.has_frozen:
                    dtype = self._dtype(kind) if piece.trainable else group.dtype_of(piece)
                    specs.append(TensorSpec(piece.name, STORED_NAMES[dtype], piece.shape))
        return specs, firsts

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, tile by tile, in the order of each file."""
        for group in self._groups:
            for tile in self._tiles[group] if self._has_trained else ():
                saved = self._range(tile)
                chunks = [
                    self._of_tile(number, tile, saved.start + first, saved.start + last)
                    for number in range(len(self.kinds))
                    for first, last in tiles(len(saved), CHUNK)
                ]
                if chunks:
                    yield from chunks[:-1]
                    yield replace(chunks[-1], tile=tile)
            if self.has_frozen:
                yield from self._of_frozen(group)

    def _range(self, tile: Tile) -> range:
        """The elements of ``tile`` that this rank saves, in the coordinates of the group's tiles."""
        own = self._saved_range(tile.group)
        return range(max(tile.start, own.start), min(tile.end, own.stop))

    def _of_tile(self, number: int, tile: Tile, start: int, end: int) -> Chunk:
        """Elements [start, end) of a kind of state of ``tile``, in the tile's coordinates."""
        layout, group, kind = self._layout.for_group(tile.group), tile.group, self.kinds[number]
        inside, upper = start - tile.start, None
        numel, itemsize = end - start, group.dtype.itemsize
        params = Range(group.shard_home, start * itemsize, numel * itemsize)
        if number:
            nbytes = numel * layout.moment_format.itemsize
            source = Range(tile.state, layout.moment_at(number - 1, tile.numel, inside), nbytes)
        elif layout.master_itemsize:
            source = Range(tile.state, inside * layout.master_itemsize, numel * layout.master_itemsize)
            upper = params if layout.splits else None
        else:
            source = params
        parameter_segments = segments(self._pieces(group), start, end)
        stored = self._dtype(kind).itemsize
        parts = tuple(
            ((segment.start - start) * stored, segment.numel * stored)
            for segment in parameter_segments
            if segment.piece.trainable
        )
        return Chunk(kind, source, upper, parts)

    def _of_frozen(self, group: ParamGroup) -> Iterator[Chunk]:
        pieces, own = self._frozen_pieces(group)
        itemsize = group.dtype.itemsize
        for first, last in tiles(len(own), CHUNK):
            start, end = own.start + first, own.start + last
            parts = []
            for segment in segments(pieces, start, end):
                elements = segment.piece.own_elements(segment.first, segment.numel, itemsize)
                nbytes = len(elements) * group.dtype_of(segment.piece).itemsize
                parts.append(((segment.start - start) * itemsize, nbytes))
            source = Range(group.home, start * itemsize, (end - start) * itemsize)
            yield Chunk(WEIGHTS, source, None, tuple(parts), trained=False)

    def _dtype(self, kind: str) -> torch.dtype:
        """The dtype of trained parameters' state in the file of ``kind``."""
        return torch.float32 if kind == WEIGHTS else self._layout.moment_dtype()

    def _pieces(self, group: ParamGroup) -> tuple[Piece, ...]:
        """Trained parameters, or parts of them, in the coordinates of the group's tiles."""
        return group.shard.pieces if self._shards_state else group.layout.pieces

    def _saved_range(self, group: ParamGroup) -> range:
        """The elements of the group's tiles that this rank saves."""
        if self._shards_state:
            return range(group.shard.trainable_numel)
        return shard_ranges(group.layout, self._world.partition_size, self._world.partition_rank)[0]

    def _frozen_pieces(self, group: ParamGroup) -> tuple[tuple[Piece, ...], range]:
        """The pieces of frozen parameters, and the elements that this rank saves, in the coordinates of the home."""
        if group.sharded:
            return group.shard.pieces, range(group.shard.trainable_numel, group.shard.numel)
        return group.layout.pieces, shard_ranges(
            group.layout, self._world.partition_size, self._world.partition_rank
        )[1]

    def _trained(self, group: ParamGroup) -> Iterator[Segment]:
        own = self._saved_range(group)
        parameter_segments = segments(self._pieces(group), own.start, own.stop)
        return (segment for segment in parameter_segments if segment.piece.trainable)

    def _frozen(self, group: ParamGroup) -> Iterator[Segment]:
        pieces, own = self._frozen_pieces(group)
        return segments(pieces, own.start, own.stop)

    def _empty(self, group: ParamGroup) -> Iterator[Piece]:
        """Parameters without elements, which are in no range: the first rank saves them."""
        return (
            piece
            for piece in group.layout.pieces
            if self._world.partition_rank == 0 and not product(piece.shape)
        )
