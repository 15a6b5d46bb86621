"""Tiered state as ordinary tensors: read from its homes and written to them piece by piece, between steps.

Each rank reads its part of sharded state, and all ranks receive the whole: so all ranks make the same calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from tiering.config.fields import format_size
from tiering.errors import EngineStateError, PlacementError
from tiering.storage.arena import PAGE, round_up
from tiering.storage.read_only import COPY_REMEDY, HomeInFiles
from zero3.device.home import Home
from zero3.optimizer.tiles import FP32, Tile
from zero3.params.layout import FlatLayout, Piece, Segment, in_elements_of, product, shard_ranges, tiles
from zero3.params.param_group import ParamGroup
from zero3.params.precision import COMPUTE_DTYPES
from zero3.params.row_tiles import join_tiles
from zero3.parts import Assembly
from zero3.ranks.collectives import Collectives
from zero3.state.ranges import ranges
from zero3.state.whole_copies import shortage

log = logging.getLogger(__name__)


class TieredState:
    """Reads and writes the state that ``parts`` keeps on the tiers; not while a step is running.

    ``before_write`` is called before a parameter or its state changes on the tiers: whether it is frozen.
    """

    def __init__(self, parts: Assembly, *, before_write: Callable[[bool], None]) -> None:
        self._tiers = parts.tiers
        self._groups = parts.groups
        self._optimizer = parts.optimizer
        self._gradients = parts.gradients
        self._sink = parts.sink
        self._layout = parts.layout
        self._collectives = parts.collectives
        self._streams = parts.tiers.streams
        self._local_size = parts.world.local_size
        self._sharded_state = parts.plan.workload.world_size > 1 and parts.plan.workload.stage >= 1
        self._warned_of_halves = False
        self._before_write = before_write
        # By piece index: the places of its state.
        self._tiles_of: dict[int, list[tuple[Tile, Segment]]] = {}
        for tile in parts.tiles:
            for segment in tile.segments:
                self._tiles_of.setdefault(segment.piece.index, []).append((tile, segment))

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the optimizer's state tensors, in storage order."""
        return self._optimizer.state_names

    @property
    def collectives(self) -> Collectives | None:
        """The collectives of the ranks; None with a single rank."""
        return self._collectives

    @property
    def files_in_use(self) -> tuple[Path, ...]:
        """The files from which frozen parameters are read in place, on any rank."""
        return () if self._tiers.files is None else self._tiers.files.in_use

    def places(self) -> dict[Tensor, tuple[ParamGroup, Piece]]:
        """The group and the piece of each parameter of the model."""
        return {
            param: (group, piece)
            for group in self._groups
            for param, piece in zip(group.params, group.layout.pieces, strict=True)
        }

    def check_room_for_copies(self, nbytes: int, call: str) -> None:
        """PlacementError, on all ranks of the partition, if a rank's host memory has no room for ``nbytes``."""
        device, purpose = torch.device("cpu"), f"read parameters for {call}"
        tables = None if self._collectives is None else self._collectives.tables
        lacking = shortage(nbytes, device, tables, self._local_size, purpose)
        if lacking is not None:
            needed, free = map(format_size, lacking)
            raise PlacementError(
                f"{call} needs {needed} of host memory for copies of the parameters, but {free} are free. Save the"
                " model without copies: engine.save_checkpoint(DIR), engine.save_pretrained(DIR) and"
                " engine.save_16bit_model(DIR) read it piece by piece"
            )

    def weights(self, model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
        """The model's ``state_dict`` with real values, in its parameters' dtypes; tied parameters share their tensor.

        Without ``keep`` this rank only takes part in the exchange with the others, and returns an empty dict.
        """
        places = self.places()
        nbytes = sum(group.layout.numel * group.dtype.itemsize for group in self._groups)
        self.check_room_for_copies(nbytes if keep else 0, "state_dict()")
        loaded: dict[int, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, nn.Parameter):
                result[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                continue
            group, piece = places[value]
            if piece.index not in loaded:
                values = self.weight(group, piece)
                loaded[piece.index] = values if keep else values.new_empty(0)
            result[name] = loaded[piece.index]
        if not keep:
            return {}
        join_tiles(model, result)
        return result

    def masters(self, model: nn.Module) -> dict[str, Tensor]:
        """The fp32 masters of the trainable parameters of ``model``, by their names there."""
        places = self.places()
        nbytes = sum(piece.numel for _, piece in places.values() if piece.trainable) * FP32
        self.check_room_for_copies(nbytes, "master_state_dict()")
        places_by_name = {name: places[param] for name, param in model.named_parameters() if param in places}
        masters = {
            name: self.master(group, piece)
            for name, (group, piece) in places_by_name.items()
            if piece.trainable
        }
        join_tiles(model, masters)
        return masters

    def weight(self, group: ParamGroup, piece: Piece) -> Tensor:
        """A copy, in host memory, of a parameter in its dtype."""
        return self.weight_range(group, piece, 0, product(piece.shape)).view(piece.shape)

    def weight_range(self, group: ParamGroup, piece: Piece, first: int, numel: int) -> Tensor:
        """A copy of ``numel`` elements of a parameter from its ``first`` on, flat, in host memory."""
        # ``load`` needs staging slots, which tiles may have that were read ahead. And a GPU may still be writing
        # updates to host memory.
        self._optimizer.release_read_ahead()
        dtype, itemsize = group.dtype_of(piece), group.dtype.itemsize
        # In bytes from the start of the parameter: an element may be smaller than one of the flat tensor.
        wanted = range(first * dtype.itemsize, (first + numel) * dtype.itemsize)
        if not group.sharded:
            at = piece.start * itemsize + wanted.start
            return self._tiers.load(group.home, at, len(wanted)).view(dtype)
        values = torch.empty(len(wanted), dtype=torch.uint8, device="cpu")
        for part in self._stored_parts(group, piece):
            before = part.first * itemsize
            begin, end = max(wanted.start, before), min(wanted.stop, before + part.numel * itemsize)
            if begin < end:
                at = part.start * itemsize + begin - before
                raw = self._tiers.load(group.home, at, end - begin)
                values[begin - wanted.start : end - wanted.start] = raw
        self._gather(group, piece, values, wanted.start, each=itemsize)
        return values.view(dtype)

    def weight_ranges(
        self, group: ParamGroup, piece: Piece, first: int, numel: int, each: int
    ) -> Generator[Tensor]:
        """``numel`` elements of a parameter from its ``first`` on, ``each`` of them at a time at most, in host memory.

        Each range is valid until the next one is requested. All ranks take all ranges; close an unfinished iterator.
        """
        if group.sharded:
            for start, end in tiles(numel, each):
                yield self.weight_range(group, piece, first + start, end - start)
            return
        # As in ``weight_range``.
        self._optimizer.release_read_ahead()
        dtype = group.dtype_of(piece)
        begin = piece.start * group.dtype.itemsize + first * dtype.itemsize
        for raw in ranges(self._tiers, group.home, begin, numel * dtype.itemsize, each * dtype.itemsize):
            yield raw.view(dtype)

    def master(self, group: ParamGroup, piece: Piece) -> Tensor:
        """A copy, in host memory, of a parameter's fp32 master; of a frozen parameter its value in fp32.

        A parameter that keeps its dtype is returned in it.
        """
        if piece.own_dtype is not None:
            return self.weight(group, piece)
        layout = self._layout.for_group(group)
        if not layout.master_itemsize or not piece.trainable:
            return self.weight(group, piece).float()
        self._optimizer.release_read_ahead()
        whole = torch.empty(piece.numel, device="cpu")
        params = self.weight(group, piece).flatten() if layout.splits else whole
        for tile, segment, elements in self._parts(piece):
            raw = self._tiers.load(tile.state, *self._master_range(tile, segment))
            whole[elements] = layout.load_master(raw, params[elements])
        if self._sharded_state:
            self._gather(group, piece, whole)
        return whole.view(piece.shape)

    def set_master(self, group: ParamGroup, piece: Piece, values: Tensor) -> None:
        """Set the master to ``values`` (fp32, flat), and the parameter to the rounded values."""
        # Tiles that were read ahead have the old masters.
        self._optimizer.release_read_ahead()
        if self._layout.for_group(group).master_itemsize and piece.trainable:
            for tile, segment, elements in self._parts(piece):
                self._store_master(tile, segment, values[elements])
        rounded = torch.empty(piece.numel, dtype=group.dtype, device="cpu")
        round_parameters(values, rounded)
        self._store_weight(group, piece, rounded)

    def moment(self, group: ParamGroup, piece: Piece, name: str) -> Tensor:
        """A copy, in host memory and fp32, of the state tensor ``name`` of a trainable parameter."""
        number = self._moment_number(name)
        self._optimizer.release_read_ahead()
        whole = torch.empty(piece.numel, device="cpu")
        layout = self._layout.for_group(group)
        for tile, segment, elements in self._parts(piece):
            offset = layout.moment_at(number, tile.numel, segment.start - tile.start)
            raw = self._tiers.load(tile.state, offset, segment.numel * layout.moment_format.itemsize)
            whole[elements] = raw.view(layout.moment_dtype()).float()
        if self._sharded_state:
            self._gather(group, piece, whole)
        return whole.view(piece.shape)

    def set_moment(self, piece: Piece, name: str, values: Tensor) -> None:
        """Replace the state tensor ``name`` by ``values`` (fp32, flat), rounded to nearest if it has 16 bits."""
        number = self._moment_number(name)
        # Tiles that were read ahead have the old moments.
        self._optimizer.release_read_ahead()
        for tile, segment, elements in self._parts(piece):
            layout = self._layout.for_group(tile.group)
            raw = torch.empty(segment.numel * layout.moment_format.itemsize, dtype=torch.uint8, device="cpu")
            layout.store_moment(values[elements], raw)
            self._patch(tile.state, layout.moment_at(number, tile.numel, segment.start - tile.start), raw)

    def dtype_on(self, rank: int, piece: Piece, local_dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype of the values for ``piece`` on ``rank``; None if they do not fit. ``local_dtype`` is that here."""
        if self._collectives is None:
            return local_dtype
        dtypes = (None, *COMPUTE_DTYPES.values(), piece.own_dtype)
        row = torch.tensor([dtypes.index(local_dtype)], device="cpu")
        rows = self._collectives.tables.table(row, f"tell the dtype of {piece.name!r}")
        return dtypes[int(rows[rank][0])]

    def values_of_rank(self, rank: int, piece: Piece, values: Tensor) -> Tensor:
        """The flat ``values`` of ``piece`` on ``rank``; with a single rank, ``values`` themselves."""
        if self._collectives is None:
            return values
        purpose = f"take over {piece.name!r}"
        # Before the broadcast: a rank that is elsewhere would take these bytes for those of another one.
        self._collectives.agree(purpose)
        received = values.detach().to("cpu", copy=True).contiguous()
        self._collectives.tables.broadcast(received, rank, purpose)
        return received

    def are_alike(self, piece: Piece, values: Tensor, local_values: Tensor) -> bool:
        """Whether the ``local_values`` of ``piece`` on each rank have the bits of ``values``, which all ranks have."""
        if self._collectives is None:
            return True
        alike = torch.equal(values.view(torch.uint8), local_values.cpu().view(torch.uint8))
        rows = self._collectives.tables.table(torch.tensor([alike], device="cpu"), f"compare {piece.name!r}")
        return bool(rows.all())

    def has_gradient(self, piece: Piece) -> bool:
        """Whether the parameter has received a gradient since the last step."""
        # A deferred step still uses the gradients from before it.
        return not self._optimizer.deferring and self._gradients.received(piece)

    def holds_gradient(self, piece: Piece) -> bool:
        """Whether it has received one on this rank or, as far as this rank knows, on another one."""
        return not self._optimizer.deferring and self._sink.holds(piece)

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether gradients wait for the last backward of a step, which reduces them over the ranks."""
        return self._sink.unreduced

    def drop_gradient(self, group: ParamGroup, piece: Piece) -> None:
        """Drop the gradient that the parameter has received since the last step."""
        if not self._optimizer.deferring:
            self._sink.drop(group, piece)

    def gradient(self, group: ParamGroup, piece: Piece) -> Tensor | None:
        """A copy, in host memory, of the accumulated gradient in its dtype; None if there is none."""
        if not self.has_gradient(piece):
            return None
        # Gradients may still be in flight from the device, or wait to be added.
        self._gradients.wait_for_transfers()
        self._optimizer.release_read_ahead()
        home, dtype = self._gradients.homes[group.index], self._gradients.dtype_of(group)
        whole = torch.empty(piece.numel, dtype=dtype, device="cpu")
        for part in self._stepped_parts(group, piece):
            raw = self._tiers.load(home, part.start * dtype.itemsize, part.numel * dtype.itemsize)
            whole[part.first : part.first + part.numel] = raw.view(dtype)
        if self._sharded_state:
            self._gather(group, piece, whole)
        return whole.view(piece.shape)

    def set_gradient(self, group: ParamGroup, piece: Piece, values: Tensor) -> None:
        """Replace the accumulated gradient by ``values`` (flat, any dtype)."""
        # A gradient that arrives later would be added to the new values.
        self._gradients.wait_for_transfers()
        self._optimizer.release_read_ahead()
        dtype = self._gradients.dtype_of(group)
        for part in self._stepped_parts(group, piece):
            part_values = values[part.first : part.first + part.numel].to(dtype)
            self._overwrite(self._gradients.homes[group.index], part.start * dtype.itemsize, part_values)
        # After the write: from here on the step uses the new values.
        self._sink.replaced(group, piece)

    def store_edit(self, group: ParamGroup, piece: Piece, values: Tensor, *, in_place: bool) -> None:
        """Store an edit of a parameter: ``values`` (flat, in its dtype) become the parameter, and change its master.

        An element that still equals the rounded master leaves the master unchanged, with all its bits. If the parameter
        is a half of a split master and was edited ``in_place``, the unchanged elements are unknown: then the other half
        of all its elements becomes zero, on every tier.
        """
        # Tiles that were read ahead have the old masters, and the old parameters.
        self._optimizer.release_read_ahead()
        values = values.cpu()
        layout = self._layout.for_group(group)
        if not layout.master_itemsize or not piece.trainable:
            self._store_weight(group, piece, values)
            return
        halves = layout.splits
        if halves and in_place and not self._warned_of_halves:
            self._warned_of_halves = True
            log.warning(
                "%r was edited in place with a split state: its masters are the 16-bit values now, and have lost their"
                " lower bits. Edit inside tiering.gathered(param, modify=True), or set tiering.state to a format"
                " without 'split'",
                piece.name,
            )
        # Read before the parameter changes: a split master consists of the parameter and of the other half.
        before = self.weight(group, piece).flatten() if halves and not in_place else values
        masters = self.master(group, piece).flatten() if halves and not in_place else values.float()
        self._store_weight(group, piece, values)
        for tile, segment, elements in self._parts(piece):
            new_values = values[elements]
            if halves:
                changed = before[elements].view(torch.int16) != new_values.view(torch.int16)
                self._store_master(tile, segment, torch.where(changed, new_values.float(), masters[elements]))
                continue
            master = self._tiers.load(tile.state, *self._master_range(tile, segment)).view(torch.float32)
            rounded = torch.empty_like(new_values)
            round_parameters(master, rounded)
            changed = rounded.view(torch.int16) != new_values.view(torch.int16)
            if changed.any():
                master[changed] = new_values[changed].float()
                self._store_master(tile, segment, master)

    def flip_bit(self) -> str:
        """Flip an upper bit of the middle element of the first master on NVMe; returns its place."""
        self._optimizer.release_read_ahead()
        for tile, segment in self._largest_segments():
            itemsize = self._layout.for_group(tile.group).master_itemsize
            home, base = (tile.state, 0) if itemsize else (tile.group.shard_home, tile.start * FP32)
            if home.extent is None:
                continue
            width = itemsize or FP32
            offset = base + (segment.start - tile.start + segment.numel // 2) * width
            flipped = self._tiers.load(home, offset, width)
            flipped[width // 2] ^= 1 << 4
            self._patch(home, offset, flipped)
            return (
                f"bit {width * 4 + 4} of a master of {segment.piece.name!r}, {home.extent.place_of(offset)}"
            )
        raise EngineStateError("flip_bit needs a master on NVMe, but the plan keeps none there")

    def _largest_segments(self) -> Iterable[tuple[Tile, Segment]]:
        """Each tile with its longest segment."""
        longest: dict[Tile, Segment] = {}
        for places in self._tiles_of.values():
            for tile, segment in places:
                if tile not in longest or longest[tile].numel < segment.numel:
                    longest[tile] = segment
        return longest.items()

    def _moment_number(self, name: str) -> int:
        if name not in self.state_names:
            names = ", ".join(self.state_names) or "none"
            raise EngineStateError(f"the optimizer has no state {name!r}; it has: {names}")
        return self.state_names.index(name)

    def _parts(self, piece: Piece) -> Iterator[tuple[Tile, Segment, slice]]:
        """The places of this rank's state of ``piece``: tile, segment, and the elements of the parameter."""
        for tile, segment in self._tiles_of.get(piece.index, []):
            yield tile, segment, slice(segment.first, segment.first + segment.numel)

    def _stored_parts(self, group: ParamGroup, piece: Piece) -> Iterator[Piece]:
        """The parts of a parameter that this rank stores, with their offsets in ``group.home``."""
        return _parts_of(piece, group.shard if group.sharded else group.layout)

    def _stepped_parts(self, group: ParamGroup, piece: Piece) -> Iterator[Piece]:
        """The parts of a parameter that this rank steps, with their offsets in the shard."""
        return _parts_of(piece, group.shard)

    def _store_weight(self, group: ParamGroup, piece: Piece, values: Tensor) -> None:
        """Store the flat ``values``, in the parameter's dtype, in the parts that this rank keeps."""
        if piece.own_dtype is not None:
            values = in_elements_of(group.dtype, values)
        for part in self._stored_parts(group, piece):
            part_values = values[part.first : part.first + part.numel]
            at = part.start * group.dtype.itemsize
            if group.home.files is not None:
                self._check_unchanged(group.home.files, at, piece, part_values)
            else:
                self._patch(group.home, at, part_values, frozen=not piece.trainable)

    def _check_unchanged(self, files: HomeInFiles, offset: int, piece: Piece, values: Tensor) -> None:
        """EngineStateError unless ``values`` are the bytes of a home in ``files`` at ``offset``, which never change."""
        raw = values.contiguous().view(torch.uint8)
        if raw.numel() and not torch.equal(raw, self._tiers.load(Home(files=files), offset, raw.numel())):
            raise EngineStateError(
                f"{piece.name!r} was changed, but it is frozen and read in place from {files.place_of(offset)}, which"
                f" is never written; the change is dropped. To change it, {COPY_REMEDY}; or change the file before the"
                " run"
            )

    def _gather(self, group: ParamGroup, piece: Piece, values: Tensor, start: int = 0, each: int = 1) -> None:
        """Complete the flat ``values`` of ``piece`` from ``start`` on: each rank sends those of its shard.

        ``values`` has ``each`` entries for an element of the flat tensor, in which ``start`` counts as well.
        """
        assert self._collectives is not None
        purpose, size = f"read {piece.name!r}", self._collectives.world.partition_size
        # As in ``values_of_rank``.
        self._collectives.agree(purpose)
        begin = piece.start * each + start
        for rank in range(size):
            for shard_range in shard_ranges(group.layout, size, rank):
                first = max(shard_range.start * each, begin)
                end = min(shard_range.stop * each, begin + values.numel())
                if first < end:
                    self._collectives.tables.broadcast(values[first - begin : end - begin], rank, purpose)

    def _master_range(self, tile: Tile, segment: Segment) -> tuple[int, int]:
        """Offset and length, in bytes, of a segment's masters in the state of ``tile``."""
        itemsize = self._layout.for_group(tile.group).master_itemsize
        return (segment.start - tile.start) * itemsize, segment.numel * itemsize

    def _store_master(self, tile: Tile, segment: Segment, values: Tensor) -> None:
        offset, nbytes = self._master_range(tile, segment)
        raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._layout.for_group(tile.group).store_master(values, raw)
        self._patch(tile.state, offset, raw)

    def _patch(self, home: Home, offset: int, values: Tensor, *, frozen: bool = False) -> None:
        """``_overwrite`` of what saves store."""
        # A save that is under way must have copied the old values.
        self._before_write(frozen)
        self._overwrite(home, offset, values)

    def _overwrite(self, home: Home, offset: int, values: Tensor) -> None:
        """Write the bytes of the flat ``values`` at ``offset`` of ``home``; on NVMe, in whole pages."""
        assert home.files is None, "files of a user are never written"
        # Copies to the device may still read these bytes.
        if self._streams is not None:
            self._streams.before_host_changes()
        raw = values.contiguous().view(torch.uint8)
        if home.tensor is not None:
            home.tensor[offset : offset + raw.numel()] = raw
            return
        end = round_up(offset + raw.numel())
        for at in range(offset // PAGE * PAGE, end, self._tiers.chunk_bytes):
            size = min(self._tiers.chunk_bytes, end - at)
            first, last = max(at, offset), min(at + size, offset + raw.numel())
            # The neighbours in the first and the last page, which are written whole.
            page_bytes = self._tiers.load(home, at, size) if last - first < size else None
            # The write may continue after the block: the extent orders later reads of these bytes behind it.
            with self._tiers.writing(home, at, size) as target:
                if page_bytes is not None:
                    target.copy_(page_bytes)
                target[first - at : last - at] = raw[first - offset : last - offset]


def _parts_of(piece: Piece, layout: FlatLayout) -> Iterator[Piece]:
    return (part for part in layout.pieces if part.index == piece.index)
