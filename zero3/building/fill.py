"""Moves a model's first values to their tiers as a stream, so that the buffers are smaller than a group.

The values of a parameter (first_values.py) go range by range to its home in the compute dtype, and with the full
precision of the source to the masters in its tiles' state. Moments start with the values that the optimizer defines.
The bytes of parameters that keep their dtype go to their home as they are.

Ranks receive rank 0's values, range by range; from files each rank reads its own shard. Groups whose home is in the
files already (setup/in_place.py) are not filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from tiering.errors import SwapError
from tiering.placement.group_sizes import QUANTUM
from tiering.storage.arena import Arena
from zero3.building.first_values import FirstValues, InMemory, Replayed, Source, for_home
from zero3.building.zero_init import forget, recipe_of
from zero3.device import heap
from zero3.device.home import Home
from zero3.device.tiers import WINDOW, Tiers
from zero3.optimizer.tiles import StateLayout, Tile
from zero3.params.layout import FlatLayout, Piece, segments, tiles
from zero3.params.param_group import ParamGroup
from zero3.ranks.collectives import Collectives

Start = Tensor | float
"""The first values of a moment: a flat tensor on the CPU, or one number for all elements."""

# Windows through which homes are written if staging slots are smaller.
WINDOWS = 4

RANGE = 1 << 20
"""Elements of a parameter that are read from a source at once: the window of a file."""


class Fill:
    """Fills the tiers of one rank: parameters, and masters and moments in the state of ``optimizer_tiles``.

    ``initial_state`` has the first value of the moments of parameters where it is not zero.
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
        self._windows: Arena | None = None
        self._tiles: dict[ParamGroup, list[Tile]] = {}
        for tile in optimizer_tiles:
            self._tiles.setdefault(tile.group, []).append(tile)

    def run(
        self,
        groups: Sequence[ParamGroup],
        sources: Mapping[nn.Parameter, FirstValues],
        *,
        resumes: bool = False,
    ) -> None:
        """Fill all ``groups``. Afterwards the model's parameters belong to them.

        Every rank reads the ``sources``. Other parameters have their values in memory, or were built without memory:
        then rank 0 sends its values to all ranks. If the engine ``resumes``, homes in swap space of which snapshots
        have the content have none until ``refill``, which has a source of each of their parameters.
        """
        with self._writing(groups):
            for group in groups:
                self._fill(group, sources, adopted=resumes)
                for param in group.params:
                    param.grad = None
                # Only after its values are in flight to their home: this frees the memory of the original parameters.
                group.adopt_parameters()
                # After each group, or the freed memory of all original parameters would stay resident.
                heap.trim()
        # Waits for the writes: an error of a disk ends ``initialize``, and not the first step.
        self._tiers.staging.drain()
        self._note("")
        for group in groups:
            forget(group.params)

    def refill(
        self,
        groups: Sequence[ParamGroup],
        sources: Mapping[nn.Parameter, FirstValues],
        *,
        adopted: bool = False,
    ) -> None:
        """Fill groups that own their parameters again, from ``sources``.

        Parameters without a source keep their values and masters; their moments get their first values. With
        ``adopted`` swap space, homes of which snapshots have the content have it already.
        """
        with self._writing(groups):
            for group in groups:
                self._fill(group, sources, keeps=True, adopted=adopted)
        # Waits for the writes: an error of a disk ends the load.
        self._tiers.staging.drain()
        self._note("")

    @contextmanager
    def _writing(self, groups: Iterable[ParamGroup]) -> Iterator[None]:
        """Within the block, homes on NVMe are written in windows, if there are any and staging slots are smaller.

        Waits for the writes at the end; raises SwapError if one has failed.
        """
        on_nvme = any(group.home.extent is not None for group in groups)
        if not on_nvme or self._tiers.chunk_bytes >= WINDOW:
            yield
            return
        windows = self._windows = Arena.map(WINDOWS * WINDOW, "filling")
        try:
            yield
            windows.drain()
        finally:
            self._windows = None
            # After an exception, writes may still read the windows. It is raised, and not the error of a write.
            with suppress(SwapError):
                windows.drain()
            windows.forget_memory()

    def _note(self, activity: str) -> None:
        if self._collectives is not None:
            # Other ranks, which may wait, see that this rank makes progress.
            self._collectives.peers.note(activity)

    def _fill(
        self,
        group: ParamGroup,
        sources: Mapping[nn.Parameter, FirstValues],
        *,
        keeps: bool = False,
        adopted: bool = False,
    ) -> None:
        if group.home.files is not None:
            # The files of the user have the values, and nothing else may be there.
            return
        self._note(f"filling {group.name!r}")
        layout = group.shard if group.sharded else group.layout
        params = dict(zip((piece.index for piece in group.layout.pieces), group.params, strict=True))
        unchanged = {
            piece.index for piece in group.layout.pieces if keeps and params[piece.index] not in sources
        }
        home = _Home(self._tiers, group, layout, unchanged, self._windows, adopted=adopted)
        tiles, own_layout = self._tiles.get(group, []), self._layout.for_group(group)
        state = _State(self._tiers, tiles, own_layout, unchanged, adopted=adopted)
        if home.is_adopted and state.is_adopted and self._collectives is None:
            # With other ranks, those that need the values receive them when all do.
            return
        try:
            for piece in group.layout.pieces:
                param = params[piece.index]
                if piece.index in unchanged:
                    state.restart(piece.index, self._initial_state.get(param) or 0.0)
                    continue
                local = home.pieces.get(piece.index)
                if param in sources:
                    ranges = self._own(param, for_home(sources[param], piece, group), local, home, state)
                else:
                    ranges = self._shared(param, piece, local, group)
                for first, values, moments in ranges:
                    # Both copy the values before the next range is read: it may use the same memory.
                    home.put(piece.index, first, values)
                    state.put(piece.index, first, values, moments)
            # Here, and not at the next group: the windows hold staging slots.
            home.end()
            state.end()
        except BaseException as error:
            home.abandon(error)
            state.abandon(error)
            raise

    def _own(
        self, param: nn.Parameter, first_values: FirstValues, local: Piece | None, home: _Home, state: _State
    ) -> Iterator[tuple[int, Tensor, list[Start]]]:
        """(first element, values, moments) of the ranges that this rank keeps; no range is in two tiles."""
        if local is None:
            return
        starts = self._initial_state.get(param) or 0.0
        sources = first_values.moments or (None,) * self._layout.moments
        for start, end in state.cut(local):
            stepped = state.takes(local.index, start)
            if home.is_adopted and not stepped:
                continue
            for begin, stop in tiles(end - start, RANGE):
                first, numel = start + begin, stop - begin
                moments: list[Start] = [
                    starts if source is None or not stepped else source.read(first, numel)
                    for source in sources
                ]
                yield first, first_values.values.read(first, numel), moments
        first_values.values.release()

    def _shared(
        self, param: nn.Parameter, piece: Piece, local: Piece | None, group: ParamGroup
    ) -> Iterator[tuple[int, Tensor, list[Start]]]:
        """(first element, values, moments) from rank 0: of the whole parameter, if there are other ranks."""
        recipe = recipe_of(param)
        dtype = param.dtype if piece.own_dtype is None else group.dtype
        first_values = FirstValues(InMemory(param) if recipe is None else Replayed(recipe))
        source = for_home(first_values, piece, group).values
        part = piece if self._collectives is not None else local
        if part is None:
            return
        starts: list[Start] = [self._initial_state.get(param) or 0.0] * self._layout.moments
        for start, end in tiles(part.numel, RANGE):
            first, numel = part.first + start, end - start
            if self._collectives is not None:
                yield first, self._from_first_rank(source, dtype, first, numel, piece.name), starts
            else:
                yield first, source.read(first, numel), starts
        source.release()

    def _from_first_rank(
        self, source: Source, dtype: torch.dtype, first: int, numel: int, name: str
    ) -> Tensor:
        assert self._collectives is not None
        is_first = self._collectives.tables.rank == 0
        values = source.read(first, numel) if is_first else torch.empty(numel, dtype=dtype, device="cpu")
        # Returns when the values have left that rank, whose source may then reuse its memory.
        self._collectives.tables.broadcast(values, 0, f"send the first values of {name!r}")
        return values


def copy_values(values: Tensor, into: Tensor) -> None:
    """Copy ``values`` to ``into``, rounded as optimizers round; this thread alone copies the bytes.

    Torch's threads do not speed up a copy of a few MiB, and delay it while other work has the cores.
    """
    if values.dtype is into.dtype:
        np.copyto(into.view(torch.uint8).numpy(), values.contiguous().view(torch.uint8).numpy())
    else:
        round_parameters(values, into)


class _HomeWriter:
    """The range of a home that is being written. Ranges follow each other in order; ``gaps`` are zero."""

    def __init__(self, tiers: Tiers, through: Arena | None = None) -> None:
        self._tiers = tiers
        self._through = through
        self._writing: AbstractContextManager[Tensor] | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def move(self, home: Home, offset: int, nbytes: int, gaps: Iterable[range], *, keeps: bool) -> None:
        """Write this range and begin the next one, whose ``gaps`` are set to zero.

        With ``keeps`` the next range has the contents of ``home``; otherwise its contents are undefined at first.
        """
        # First: the next range may need the staging slot of this one.
        self.end()
        # Before the window takes a slot, because ``load`` needs one as well.
        before = self._tiers.load(home, offset, nbytes) if keeps and not home.on_host else None
        writing = self._tiers.writing(home, offset, nbytes, self._through)
        self.bytes = writing.__enter__()
        # Only now: ``abandon`` ends a write that has begun.
        self._writing = writing
        if before is not None:
            self.bytes.copy_(before)
        for gap in gaps:
            self.bytes[gap.start : gap.stop].zero_()

    def end(self) -> None:
        # Forgotten first: if the write raises, ``abandon`` must not end it once more.
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.__exit__(None, None, None)

    def abandon(self, error: BaseException) -> None:
        """Drop the range that is being written, because of ``error``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.__exit__(type(error), error, error.__traceback__)


class _Home:
    """The home of a group's parameters, or of this rank's shard, filled from its beginning to its end.

    Parameters in ``unchanged`` keep their values; ranges that hold only such parameters are neither read nor written.
    On NVMe it is written through ``windows``, or with None through staging. If it is ``adopted``, and in snapshots, it
    is filled already.
    """

    def __init__(
        self,
        tiers: Tiers,
        group: ParamGroup,
        layout: FlatLayout,
        unchanged: AbstractSet[int],
        windows: Arena | None,
        *,
        adopted: bool,
    ) -> None:
        self.is_adopted = adopted and group.home.in_snapshots
        self.pieces = {piece.index: piece for piece in layout.pieces}
        self._unchanged = unchanged
        self._group = group
        self._numel = layout.numel
        self._trainable_numel = layout.trainable_numel
        chunk = (
            (tiers.chunk_bytes if windows is None else WINDOW) // group.dtype.itemsize // QUANTUM * QUANTUM
        )
        self._chunk = (chunk if group.home.extent is not None else layout.numel) or QUANTUM
        self._pieces = sorted(layout.pieces, key=lambda piece: piece.start)
        self._window = _HomeWriter(tiers, windows)
        self._at = range(0)
        self.abandon = self._window.abandon

    def put(self, index: int, first: int, values: Tensor) -> None:
        """Write the elements of ``values``, which start at ``first`` of a parameter, that are in this home."""
        piece = self.pieces.get(index)
        if piece is None or self.is_adopted:
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
        """Set the remaining bytes to zero, and finish all writes."""
        if self._numel and not self.is_adopted:
            self._advance(self._numel - 1)
        self._window.end()

    def _advance(self, at: int) -> None:
        """Move the window forward until it holds element ``at``."""
        while at >= self._at.stop:
            start = self._at.stop
            # A window ends where frozen parameters begin, so that these can stay unchanged.
            cut = self._trainable_numel if self._unchanged and start < self._trainable_numel else self._numel
            self._at = range(start, min(start + self._chunk, cut))
            itemsize = self._group.dtype.itemsize
            parts = list(segments(self._pieces, self._at.start, self._at.stop))
            keeps = any(part.piece.index in self._unchanged for part in parts)
            if keeps and all(part.piece.index in self._unchanged for part in parts):
                self._window.end()
                continue
            filled = ((each.start - start, each.start - start + each.numel) for each in parts)
            gaps = _between(filled, len(self._at), itemsize)
            nbytes = len(self._at) * itemsize
            self._window.move(self._group.home, start * itemsize, nbytes, gaps, keeps=keeps)


def _between(filled: Iterable[tuple[int, int]], end: int, itemsize: int, base: int = 0) -> Iterator[range]:
    """The byte ranges, relative to ``base``, of the elements below ``end`` outside the ``filled`` ranges, in order."""
    at = 0
    for start, stop in (*filled, (end, end)):
        if at < start:
            yield range(base + at * itemsize, base + start * itemsize)
        at = stop


@dataclass
class _Place:
    """The position in a tile's state of ``numel`` elements of a parameter from ``first``: from element ``inside``."""

    tile: int
    first: int
    numel: int
    inside: int


class _State:
    """The state of a group's tiles, filled from the first to the last. Parameters in ``unchanged`` keep masters.

    With ``adopted``, the state of tiles that is in snapshots is there already.
    """

    def __init__(
        self,
        tiers: Tiers,
        tiles: Sequence[Tile],
        layout: StateLayout,
        unchanged: AbstractSet[int],
        *,
        adopted: bool,
    ) -> None:
        self._tiles = tiles
        self._is_adopted = [adopted and tile.state.in_snapshots for tile in tiles]
        self._unchanged = unchanged
        self._layout = layout
        self._window = _HomeWriter(tiers)
        self._open = -1
        self.abandon = self._window.abandon
        self._places: dict[int, list[_Place]] = {}
        for number, tile in enumerate(tiles):
            for segment in tile.segments:
                place = _Place(number, segment.first, segment.numel, segment.start - tile.start)
                self._places.setdefault(segment.piece.index, []).append(place)

    @property
    def is_adopted(self) -> bool:
        """Whether all of it is there."""
        return all(self._is_adopted)

    def put(self, index: int, first: int, values: Tensor, moments: Sequence[Start]) -> None:
        """Set the masters and the moments of a parameter's elements, which start at ``first``."""
        for place in self._places.get(index, ()):
            begin = max(first, place.first)
            numel = min(first + values.numel(), place.first + place.numel) - begin
            if numel > 0 and not self._is_adopted[place.tile]:
                self._advance(place.tile)
                part = slice(begin - first, begin - first + numel)
                inside = place.inside + begin - place.first
                self._set_master(inside, values[part])
                for number, start in enumerate(moments):
                    self._set_moment(
                        number, inside, numel, start[part] if isinstance(start, Tensor) else start
                    )

    def restart(self, index: int, start: float) -> None:
        """Set all moments of a parameter to ``start``."""
        for place in self._places.get(index, ()):
            self._advance(place.tile)
            for number in range(self._layout.moments):
                self._set_moment(number, place.inside, place.numel, start)

    def cut(self, piece: Piece) -> Iterator[tuple[int, int]]:
        """The ranges of elements of ``piece``, cut where tiles begin or end."""
        places = self._places.get(piece.index, ())
        ends = {place.first for place in places} | {place.first + place.numel for place in places}
        start, last = piece.first, piece.first + piece.numel
        for end in (*sorted(end for end in ends if start < end < last), last):
            if start < end:
                yield start, end
            start = end

    def takes(self, index: int, first: int) -> bool:
        """Whether element ``first`` of a parameter is in one of the tiles whose state is filled."""
        return any(
            place.first <= first < place.first + place.numel and not self._is_adopted[place.tile]
            for place in self._places.get(index, ())
        )

    def end(self) -> None:
        self._advance(len(self._tiles) - 1)
        self._window.end()

    def _advance(self, number: int) -> None:
        while self._open < number:
            self._open += 1
            if self._is_adopted[self._open]:
                continue
            tile = self._tiles[self._open]
            keeps = any(segment.piece.index in self._unchanged for segment in tile.segments)
            nbytes = tile.numel * self._layout.itemsize
            self._window.move(tile.state, 0, nbytes, self._gaps(tile), keeps=keeps)

    def _gaps(self, tile: Tile) -> Iterator[range]:
        """The padding bytes in the masters of ``tile`` and in each moment."""
        layout = self._layout
        filled = [(each.start - tile.start, each.start - tile.start + each.numel) for each in tile.segments]
        if layout.master_itemsize:
            yield from _between(filled, tile.numel, layout.master_itemsize)
        for moment in range(layout.moments):
            base = layout.moment_at(moment, tile.numel, 0)
            yield from _between(filled, tile.numel, layout.moment_format.itemsize, base)

    def _set_master(self, inside: int, values: Tensor) -> None:
        """Set masters of the open tile from element ``inside`` on."""
        itemsize = self._layout.master_itemsize
        if itemsize:
            stored = self._window.bytes[inside * itemsize :][: values.numel() * itemsize]
            if self._layout.splits:
                self._layout.store_master(values.float(), stored)
            else:
                copy_values(values, stored.view(torch.float32))

    def _set_moment(self, number: int, inside: int, numel: int, start: Start) -> None:
        """Set ``numel`` elements of a moment of the open tile from element ``inside`` on."""
        at = self._layout.moment_at(number, self._tiles[self._open].numel, inside)
        stored = self._window.bytes[at : at + numel * self._layout.moment_format.itemsize]
        if isinstance(start, Tensor):
            copy_values(start, stored.view(self._layout.moment_dtype()))
        elif start == 0:
            # By this thread alone, as in ``copy_values``: torch's threads wait for each other where other work runs.
            stored.numpy().fill(0)
        else:
            stored.view(self._layout.moment_dtype()).fill_(start)
