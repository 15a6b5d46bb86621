"""How a model's first values reach their tiers: streamed, so that what is in between is never a whole group.

A ``Source`` gives the values of one parameter, range by range: from memory, from what was recorded when the model was
built (zero_init.py), or from a file (weights.py). They go to the home of the parameter in the compute dtype, and with
all the precision that the source has to the masters in its tiles' state. What else is state starts as the optimizer
says.

Ranks take rank 0's values, range by range; from files each of them reads its own shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from zero3.building.zero_init import Recipe, forget, recipe_of
from zero3.device import heap
from zero3.device.tiers import Home, Tiers
from zero3.optimizer.tiles import StateLayout, Tile
from zero3.params.layout import QUANTUM, FlatLayout, Piece, segments, tiles
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives

Start = Tensor | float
"""The first values of a moment: flat, on the CPU, or all of them one number."""

RANGE = 1 << 20
"""Elements of a parameter that are taken from a source at once: a window of a file that is read."""


class Source(Protocol):
    """Where the values of one parameter come from."""

    def read(self, first: int, numel: int) -> Tensor:
        """The elements [first, first + numel), flat, on the CPU, in any floating dtype, until the next ``read``."""

    def release(self) -> None:
        """Give back what the source holds for reading; it may be read again."""


class InMemory:
    """A parameter that has its values."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._flat: Tensor | None = None

    def read(self, first: int, numel: int) -> Tensor:
        if self._flat is None:
            self._flat = self._param.detach().flatten()  # a view, unless its elements are not in order
        return self._flat[first : first + numel].cpu()

    def release(self) -> None:
        self._flat = None


class Replayed:
    """A parameter that was built without memory."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._flat: Tensor | None = None

    def read(self, first: int, numel: int) -> Tensor:
        if self._flat is None:
            self._flat = self._recipe.make().flatten()
        return self._flat[first : first + numel]

    def release(self) -> None:
        self._flat = None


@dataclass(frozen=True)
class Given:
    """What a parameter is filled with: its values, and those of each of its moments (None: what they start from)."""

    values: Source
    moments: tuple[Source | None, ...] = ()


class Fill:
    """Fills the tiers of one rank: parameters, and masters and moments in the state of ``optimizer_tiles``.

    ``initial_state`` is what moments start from, where it is not zero.
    """

    def __init__(
        self,
        tiers: Tiers,
        optimizer_tiles: Sequence[Tile],
        layout: StateLayout,
        initial_state: Mapping[nn.Parameter, float],
        collectives: Collectives | None,
    ) -> None:
        self._tiers = tiers
        self._layout = layout
        self._initial_state = initial_state
        self._collectives = collectives
        self._tiles: dict[ParamGroup, list[Tile]] = {}
        for tile in optimizer_tiles:
            self._tiles.setdefault(tile.group, []).append(tile)

    def run(self, groups: Sequence[ParamGroup], given: Mapping[nn.Parameter, Given]) -> None:
        """Fill all of it. Afterwards the model's parameters belong to their groups.

        Every rank reads for itself what is in ``given``. Other parameters have their values in memory, or were built
        without: then rank 0's are sent to all.
        """
        for group in groups:
            self._fill(group, given)
            for param in group.params:
                param.grad = None
            group.adopt_parameters()
            heap.trim()  # after each group, or the originals of all of them would stay resident
        self._tiers.staging.drain()
        self._note("")
        for group in groups:
            forget(group.params)

    def again(self, groups: Sequence[ParamGroup], given: Mapping[nn.Parameter, Given]) -> None:
        """Fill groups that have their parameters anew, with what is ``given``.

        Other parameters keep their values, and their masters; their moments start anew.
        """
        for group in groups:
            self._fill(group, given, keeps=True)
        self._tiers.staging.drain()
        self._note("")

    def _note(self, doing: str) -> None:
        if self._collectives is not None:  # others that wait see that this rank moves
            self._collectives.peers.note(doing)

    def _fill(self, group: ParamGroup, given: Mapping[nn.Parameter, Given], *, keeps: bool = False) -> None:
        self._note(f"filling {group.name!r}")
        kept = group.shard if group.sharded else group.layout
        params = dict(zip((piece.index for piece in group.layout.pieces), group.params, strict=True))
        held = {piece.index for piece in group.layout.pieces if keeps and params[piece.index] not in given}
        home = _Home(self._tiers, group, kept, held)
        state = _State(self._tiers, self._tiles.get(group, []), self._layout.for_group(group), held)
        try:
            for piece in group.layout.pieces:
                param = params[piece.index]
                if piece.index in held:
                    state.restart(piece.index, self._initial_state.get(param) or 0.0)
                    continue
                if param in given:
                    ranges = self._own(param, given[param], home.pieces.get(piece.index), state)
                else:
                    ranges = self._shared(param, piece, home.pieces.get(piece.index))
                for first, values, moments in ranges:
                    home.put(piece.index, first, values)
                    state.put(piece.index, first, values, moments)
            home.end()
            state.end()
        except BaseException as error:
            home.abandon(error)
            state.abandon(error)
            raise

    def _own(
        self, param: nn.Parameter, given: Given, mine: Piece | None, state: _State
    ) -> Iterator[tuple[int, Tensor, list[Start]]]:
        """(first element, values, moments) of the ranges that this rank keeps; none is in two tiles."""
        if mine is None:
            return
        starts = self._initial_state.get(param) or 0.0
        sources = given.moments or (None,) * self._layout.moments
        for start, end in state.cut(mine):
            stepped = state.has(mine.index, start)
            for begin, stop in tiles(end - start, RANGE):
                first, numel = start + begin, stop - begin
                moments: list[Start] = [
                    starts if source is None or not stepped else source.read(first, numel)
                    for source in sources
                ]
                yield first, given.values.read(first, numel), moments
        given.values.release()

    def _shared(
        self, param: nn.Parameter, piece: Piece, mine: Piece | None
    ) -> Iterator[tuple[int, Tensor, list[Start]]]:
        """(first element, values, moments) of what rank 0 has: all of the parameter, if there are others."""
        recipe = recipe_of(param)
        source = InMemory(param) if recipe is None else Replayed(recipe)
        wanted = piece if self._collectives is not None else mine
        if wanted is None:
            return
        starts: list[Start] = [self._initial_state.get(param) or 0.0] * self._layout.moments
        for start, end in tiles(wanted.numel, RANGE):
            first, numel = wanted.first + start, end - start
            if self._collectives is not None:
                yield first, self._from_first_rank(source, param.dtype, first, numel, piece.name), starts
            else:
                yield first, source.read(first, numel), starts
        source.release()

    def _from_first_rank(
        self, source: Source, dtype: torch.dtype, first: int, numel: int, name: str
    ) -> Tensor:
        assert self._collectives is not None
        if self._collectives.world.rank == 0:
            values = source.read(first, numel)
        else:
            values = torch.empty(numel, dtype=dtype, device="cpu")
        self._collectives.broadcast(values, 0, f"send the first values of {name!r}")
        return values


def copy_values(values: Tensor, into: Tensor) -> None:
    """``into`` = ``values``, rounded as optimizers round; bytes are moved by this thread alone.

    A copy of a few MiB gains nothing by torch's threads, and waits for them where other work has the cores.
    """
    if values.dtype is into.dtype:
        np.copyto(into.view(torch.uint8).numpy(), values.contiguous().view(torch.uint8).numpy())
    else:
        round_parameters(values, into)


class _Window:
    """The one range of a home that is being written; what comes must come in order, and ``gaps`` are zero."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._writing: AbstractContextManager[Tensor] | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def move(self, home: Home, offset: int, nbytes: int, gaps: Iterable[range], *, keeps: bool) -> None:
        """End this range, and begin another, in which nothing will be put into ``gaps``.

        It ``keeps`` what is not put there, or else has no contents yet.
        """
        self.end()
        before = self._tiers.load(home, offset, nbytes) if keeps and not home.on_host else None
        writing = self._tiers.writing(home, offset, nbytes)
        self.bytes = writing.__enter__()
        self._writing = writing
        if before is not None:
            self.bytes.copy_(before)
        for gap in gaps:
            self.bytes[gap.start : gap.stop].zero_()

    def end(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.__exit__(None, None, None)

    def abandon(self, error: BaseException) -> None:
        """Give up the range that is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.__exit__(type(error), error, error.__traceback__)


class _Home:
    """The home of a group's parameters, or of this rank's shard of them, filled from its beginning to its end.

    Those that are ``held`` keep their values; ranges with no others are neither read nor written.
    """

    def __init__(self, tiers: Tiers, group: ParamGroup, kept: FlatLayout, held: AbstractSet[int]) -> None:
        self.pieces = {piece.index: piece for piece in kept.pieces}
        self._held = held
        self._group = group
        self._numel = kept.numel
        self._trainable_numel = kept.trainable_numel
        most = tiers.chunk_bytes // group.dtype.itemsize // QUANTUM * QUANTUM
        self._chunk = (most if group.home.extent is not None else kept.numel) or QUANTUM
        self._pieces = sorted(kept.pieces, key=lambda piece: piece.start)
        self._window = _Window(tiers)
        self._at = range(0)
        self.abandon = self._window.abandon

    def put(self, index: int, first: int, values: Tensor) -> None:
        """Write those of ``values``, elements of a parameter from ``first`` on, that are kept here."""
        piece = self.pieces.get(index)
        if piece is None:
            return
        begin = max(first, piece.first)
        end = min(first + values.numel(), piece.first + piece.numel)
        while begin < end:
            at = piece.start + begin - piece.first
            self._advance(at)
            numel = min(end - begin, self._at.stop - at)
            into = self._window.bytes.view(self._group.dtype)[at - self._at.start :][:numel]
            copy_values(values[begin - first :][:numel], into)
            begin += numel

    def end(self) -> None:
        """Zero what is left, and write all of it."""
        if self._numel:
            self._advance(self._numel - 1)
        self._window.end()

    def _advance(self, at: int) -> None:
        """Let the window hold element ``at``."""
        while at >= self._at.stop:
            start = self._at.stop
            # Where frozen parameters begin a window ends, so that they can be left alone.
            cut = self._trainable_numel if self._held and start < self._trainable_numel else self._numel
            self._at = range(start, min(start + self._chunk, cut))
            itemsize = self._group.dtype.itemsize
            parts = list(segments(self._pieces, self._at.start, self._at.stop))
            keeps = any(part.piece.index in self._held for part in parts)
            if keeps and all(part.piece.index in self._held for part in parts):
                self._window.end()
                continue
            filled = ((each.start - start, each.start - start + each.numel) for each in parts)
            gaps = _between(filled, len(self._at), itemsize)
            nbytes = len(self._at) * itemsize
            self._window.move(self._group.home, start * itemsize, nbytes, gaps, keeps=keeps)


def _between(filled: Iterable[tuple[int, int]], end: int, itemsize: int, base: int = 0) -> Iterator[range]:
    """The bytes, from ``base`` on, of those of ``end`` elements that are not in the ranges ``filled``, in order."""
    at = 0
    for start, stop in (*filled, (end, end)):
        if at < start:
            yield range(base + at * itemsize, base + start * itemsize)
        at = stop


@dataclass
class _Place:
    """Where elements of a parameter are in a tile's state: ``numel`` of them from its ``first``, at ``inside``."""

    tile: int
    first: int
    numel: int
    inside: int


class _State:
    """The state of a group's tiles, filled from the first to the last. Those that are ``held`` keep their masters."""

    def __init__(
        self, tiers: Tiers, tiles: Sequence[Tile], layout: StateLayout, held: AbstractSet[int]
    ) -> None:
        self._tiles = tiles
        self._held = held
        self._layout = layout
        self._window = _Window(tiers)
        self._open = -1
        self.abandon = self._window.abandon
        self._places: dict[int, list[_Place]] = {}
        for number, tile in enumerate(tiles):
            for segment in tile.segments:
                place = _Place(number, segment.first, segment.numel, segment.start - tile.start)
                self._places.setdefault(segment.piece.index, []).append(place)

    def put(self, index: int, first: int, values: Tensor, moments: Sequence[Start]) -> None:
        """Set the masters of a parameter's elements from ``first`` on, and their moments."""
        for place in self._places.get(index, ()):
            begin = max(first, place.first)
            numel = min(first + values.numel(), place.first + place.numel) - begin
            if numel > 0:
                self._advance(place.tile)
                here = slice(begin - first, begin - first + numel)
                inside = place.inside + begin - place.first
                self._set_master(inside, values[here])
                for number, start in enumerate(moments):
                    self._set_moment(
                        number, inside, numel, start[here] if isinstance(start, Tensor) else start
                    )

    def restart(self, index: int, start: float) -> None:
        """Set all moments of a parameter to ``start``."""
        for place in self._places.get(index, ()):
            self._advance(place.tile)
            for number in range(self._layout.moments):
                self._set_moment(number, place.inside, place.numel, start)

    def cut(self, mine: Piece) -> Iterator[tuple[int, int]]:
        """The elements of a parameter, or of a part of one, cut where a tile begins or ends."""
        places = self._places.get(mine.index, ())
        ends = {place.first for place in places} | {place.first + place.numel for place in places}
        start, last = mine.first, mine.first + mine.numel
        for end in (*sorted(end for end in ends if start < end < last), last):
            if start < end:
                yield start, end
            start = end

    def has(self, index: int, first: int) -> bool:
        """Whether element ``first`` of a parameter is in one of the tiles."""
        return any(place.first <= first < place.first + place.numel for place in self._places.get(index, ()))

    def end(self) -> None:
        self._advance(len(self._tiles) - 1)
        self._window.end()

    def _advance(self, number: int) -> None:
        while self._open < number:
            self._open += 1
            tile = self._tiles[self._open]
            keeps = any(segment.piece.index in self._held for segment in tile.segments)
            nbytes = tile.numel * self._layout.itemsize
            self._window.move(tile.state, 0, nbytes, self._gaps(tile), keeps=keeps)

    def _gaps(self, tile: Tile) -> Iterator[range]:
        """What of the bytes of ``tile`` only pads, in its masters and in each moment."""
        layout = self._layout
        held = [(each.start - tile.start, each.start - tile.start + each.numel) for each in tile.segments]
        if layout.master_itemsize:
            yield from _between(held, tile.numel, layout.master_itemsize)
        for moment in range(layout.moments):
            base = layout.moment_at(moment, tile.numel, 0)
            yield from _between(held, tile.numel, layout.moment_format.itemsize, base)

    def _set_master(self, inside: int, values: Tensor) -> None:
        """Of elements of the open tile from ``inside`` on."""
        itemsize = self._layout.master_itemsize
        if itemsize:
            kept = self._window.bytes[inside * itemsize :][: values.numel() * itemsize]
            if self._layout.splits:
                self._layout.store_master(values.float(), kept)
            else:
                copy_values(values, kept.view(torch.float32))

    def _set_moment(self, number: int, inside: int, numel: int, start: Start) -> None:
        """Of elements of the open tile from ``inside`` on."""
        at = self._layout.moment_at(number, self._tiles[self._open].numel, inside)
        kept = self._window.bytes[at : at + numel * self._layout.moment_format.itemsize]
        if isinstance(start, Tensor):
            copy_values(start, kept.view(self._layout.moment_dtype()))
        else:
            kept.view(self._layout.moment_dtype()).fill_(start)
