"""Tiles: sub-groups of optimizer state with their homes, the layout of their state, and its reads and writes.

A tile's state is one range of bytes: the master, or its lower half, followed by each of the moments, as exp_avg |
exp_avg_sq. In fp32 the parameter itself is the master; in the split format the parameter is the upper half of the
master and the state holds the lower half (see kernels.h); SGD without momentum has no moments.

A tile with bytes on NVMe is updated in a staging slot. The slot holds, each part at a multiple of 4096 bytes: optimizer
state | parameter | gradient, except for parts that live in host memory. The state is one range of its extent: one read
and one write. The state, and parameters where the step reads them, do not change before the step, so they are read
ahead from the start of the step's last backward. A gradient is read as soon as it is final. Writes continue into the
next forward; slab_file.py makes a read of the same bytes wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.formats import round_parameters
from optim_cpu.kernels import DType, StateFormat
from tiering.placement.plan import SubGroup
from tiering.placement.workload import Workload
from tiering.storage import read_ahead
from tiering.storage.arena import Completion
from zero3.device.storages import as_tensor
from zero3.device.streams import Event
from zero3.device.tiers import Home, Tiers
from zero3.params.layout import Piece, Segment, segments
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore

FP32 = 4
KIND = "parameters"  # of the copies to the device and from it


@dataclass(frozen=True)
class StateLayout:
    """The layout of the state of a tile: bytes per element of master and moments, and the number of moments."""

    master_itemsize: int  # 0: the parameter is the master; 2: its lower half; 4
    moments: int
    moment_format: StateFormat

    @classmethod
    def of(cls, load: Workload, moment_format: StateFormat) -> StateLayout:
        return cls(load.master_itemsize, load.state_tensors, moment_format)

    def for_group(self, group: ParamGroup) -> StateLayout:
        """The layout for the tiles of ``group``: parameters that are kept in fp32 are the masters."""
        return replace(self, master_itemsize=0) if group.in_fp32 else self

    @property
    def splits(self) -> bool:
        """Whether parameter and state hold a half of the master each."""
        return self.master_itemsize == 2

    @property
    def itemsize(self) -> int:
        """Bytes of state per element."""
        return self.master_itemsize + self.moments * self.moment_format.itemsize

    def moment_at(self, number: int, numel: int, inside: int) -> int:
        """The offset of element ``inside`` of a moment in the state of a tile of ``numel`` elements."""
        return numel * self.master_itemsize + (number * numel + inside) * self.moment_format.itemsize

    def moment_dtype(self) -> torch.dtype:
        return torch.float32 if self.moment_format is StateFormat.FP32 else torch.bfloat16

    def store_moment(self, values: Tensor, into: Tensor) -> None:
        """Write fp32 ``values`` as a moment to the bytes ``into``; in bf16 rounded to the nearest."""
        round_parameters(values, into.view(self.moment_dtype()))

    def store_master(self, values: Tensor, into: Tensor) -> None:
        """Write the part of the flat fp32 masters ``values`` that the state holds to the bytes ``into``."""
        if self.splits:
            # Names for both tensors: the kernel gets addresses, which keep nothing alive.
            wide = values.contiguous()
            upper = torch.empty_like(wide, dtype=torch.bfloat16)
            kernels.split(upper.data_ptr(), into.data_ptr(), wide.data_ptr(), wide.numel())
        else:
            into.view(torch.float32).copy_(values)

    def load_master(self, state: Tensor, params: Tensor) -> Tensor:
        """The fp32 masters, from the bytes of ``state`` and, in the split format, the parameters."""
        if not self.splits:
            return state.view(torch.float32)
        master = torch.empty(params.numel(), device="cpu")
        kernels.join(master.data_ptr(), params.data_ptr(), state.data_ptr(), master.numel())
        return master


class StepListener(Protocol):
    """Is called before a step changes the state or the parameters of a tile, for example to copy them first."""

    def before_change(self, tile: Tile) -> None: ...


@dataclass(eq=False)
class Tile:
    """A sub-group: elements [start, end) of this rank's shard of ``group``, its segments, and where its state lives.

    ``visits``: a GPU updates it, after copies of its parts in host memory.

    ``first_indices`` are the positions of the segments' first elements among all elements of the model, in its order:
    stochastic rounding depends on them, and not on the placement.
    """

    group: ParamGroup
    start: int
    end: int
    state: Home
    segments: tuple[Segment, ...]
    first_indices: tuple[int, ...]
    visits: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start


def make_tiles(sub_groups: Iterable[SubGroup], groups: Sequence[ParamGroup], tiers: Tiers) -> list[Tile]:
    """The planned sub-groups with homes for their state."""
    begins: dict[int, int] = {}
    elements = 0
    pieces = (piece for group in groups for piece in group.layout.pieces)
    for piece in sorted(pieces, key=lambda piece: piece.index):
        begins[piece.index] = elements
        elements += piece.numel
    tiles = []
    for planned in sub_groups:
        group = groups[planned.group]
        parts = tuple(segments(group.shard.pieces, planned.start, planned.end))
        names = tuple(segment.piece.name for segment in parts)
        home = tiers.home(planned.tier, tiers.plan.tile_state_bytes(planned), "optimizer state", names)
        indices = tuple(begins[s.piece.index] + s.first for s in parts)
        tiles.append(Tile(group, planned.start, planned.end, home, parts, indices, planned.visits))
    return tiles


Staged = read_ahead.Staged[Tile, Completion]
StatePipeline = read_ahead.StagingPipeline[Tile, Completion]


class SlotTransfers:
    """Moves the bytes of one tile between its homes and its slot. The staging pipeline decides when.

    ``is_stepped`` says whether the optimizer's step updates a parameter.
    """

    def __init__(self, gradients: GradientStore, tiers: Tiers, is_stepped: Callable[[Piece], bool]) -> None:
        self._is_stepped = is_stepped
        self._gradients = gradients
        self._tiers = tiers
        self._steps_need_params = tiers.plan.workload.steps_need_params
        self._slots = tiers.plan.staging
        self._written: Event | None = None  # the last copy of stepped parameters to the device

    def pipeline(self) -> StatePipeline:
        """A pipeline over the staging slots of the plan."""
        tiers = self._tiers
        return StatePipeline(
            self, tiers.staging, self._slots.slot_bytes, lambda: tiers.stalls.waiting_for(read_ahead.SLOT)
        )

    def start_reads(self, staged: Staged) -> None:
        """Start to read the state, and the parameters if the step reads them."""
        tile, home, itemsize = staged.tile, staged.tile.group.shard_home, staged.tile.group.dtype.itemsize
        if tile.state.extent is not None:
            self._read(staged, tile.state, 0, 0, tile.state.extent.nbytes)
        needs_params = self._needs_params(tile)
        if needs_params and home.extent is not None:
            param_at = self._slots.param_offset
            self._read(staged, home, param_at, tile.start * itemsize, tile.numel * itemsize)
        elif needs_params and home.on_device:
            streams, copies = self._tiers.streams, self._tiers.copies
            assert home.tensor is not None and streams is not None and copies is not None
            source = home.tensor[tile.start * itemsize : tile.end * itemsize]
            target = as_tensor(staged.lease)[self._slots.param_offset :][: source.numel()]
            # Compute may still write these parameters: the copy comes after what it was given so far.
            staged.reads.append(copies.to_host(target, source, after=[streams.compute.record()], kind=KIND))

    def start_gradient_read(self, staged: Staged) -> bool:
        """Start to read the gradient, before all queued reads of state: those started earlier and are needed later."""
        tile, itemsize = staged.tile, self._gradients.dtype_of(staged.tile.group).itemsize
        if self._gradients.windows.address(tile.group):
            return False
        home = self._gradients.homes[tile.group.index]
        grad_at, offset = self._slots.grad_offset, tile.start * itemsize
        self._read(staged, home, grad_at, offset, tile.numel * itemsize, read_ahead.FETCH_PRIORITY)
        return True

    def wait_for_reads(self, reads: Sequence[Completion]) -> None:
        with self._tiers.stalls.waiting_for("optimizer state"):
            for read in reads:
                read.wait()

    def before_discard(self, reads: Sequence[Completion]) -> None:
        """Order later changes of parameters on the device behind the copies that still read them."""
        for read in reads:
            # The copy still reads the parameters at home, and nobody else waits for it.
            if isinstance(read, Event):
                assert self._tiers.streams is not None
                self._tiers.streams.compute.wait_for(read)

    def start_writes(self, staged: Staged) -> list[Completion]:
        """Start to write the parameters and the state, each unless it lives in host memory."""
        tile, swap = staged.tile, self._tiers.swap
        home, writes = tile.group.shard_home, list[Completion]()
        itemsize = tile.group.dtype.itemsize
        if not home.on_host:
            if not self._needs_params(tile):
                # Before the write, which takes the slot as it is.
                self._complete_parameters(staged)
            part = staged.lease.part(self._slots.param_offset, tile.numel * itemsize)
            if home.extent is not None:
                assert swap is not None
                writes.append(swap.swap_out(home.extent, part, offset=tile.start * itemsize))
            else:
                streams, copies = self._tiers.streams, self._tiers.copies
                assert home.tensor is not None and streams is not None and copies is not None
                source = as_tensor(staged.lease)[self._slots.param_offset :][: part.nbytes]
                target = home.tensor[tile.start * itemsize :][: part.nbytes]
                # Compute may still read the old parameters.
                self._written = copies.to_device(target, source, after=[streams.compute.record()], kind=KIND)
                # The slot stays until the copy has read it.
                writes.append(self._written)
        if tile.state.extent is not None:
            assert swap is not None
            writes.append(swap.swap_out(tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes)))
        return writes

    def hold_compute(self) -> None:
        """Order later kernels of compute behind the copies of updated parameters to the device."""
        if self._written is not None:
            assert self._tiers.copies is not None
            # The copies run on one stream: when the last of them has ended, all have.
            self._tiers.copies.hold_compute(self._written, KIND)
            self._written = None

    def param_address(self, tile: Tile, staged: Staged | None) -> int:
        """The address of the tile's parameters during its update."""
        home = tile.group.shard_home
        if home.on_host:
            return home.address + tile.start * tile.group.dtype.itemsize
        assert staged is not None
        return staged.lease.address + self._slots.param_offset

    def grad_address(self, tile: Tile, staged: Staged | None) -> int:
        """The address of the tile's gradients during its update."""
        group = self._gradients.windows.address(tile.group)
        if group:
            return group + tile.start * self._gradients.dtype_of(tile.group).itemsize
        assert staged is not None
        return staged.lease.address + self._slots.grad_offset

    def _read(
        self, staged: Staged, home: Home, slot_offset: int, offset: int, nbytes: int, priority: int = 0
    ) -> None:
        assert home.extent is not None and self._tiers.swap is not None
        part = staged.lease.part(slot_offset, nbytes)
        # The extent orders this read behind the write-back of the step before, if that is still in flight.
        staged.reads.append(self._tiers.swap.swap_in(home.extent, part, offset=offset, priority=priority))

    def _needs_params(self, tile: Tile) -> bool:
        """Whether the step of ``tile`` reads its parameters: they are the masters, or halves of them."""
        return self._steps_need_params or tile.group.in_fp32

    def _complete_parameters(self, staged: Staged) -> None:
        """Fill in the 16-bit parameters that were not stepped, which are their masters rounded.

        The slot is written back whole, and these parameters were not read into it.
        """
        tile, itemsize = staged.tile, staged.tile.group.dtype.itemsize
        state = tile.state.address or staged.lease.address
        for segment in tile.segments:
            if not self._is_stepped(segment.piece):
                inside = segment.start - tile.start
                target = staged.lease.address + self._slots.param_offset + inside * itemsize
                if tile.group.dtype is torch.bfloat16:
                    kernels.split(target, 0, state + inside * FP32, segment.numel)
                else:
                    dtype = KERNEL_DTYPES[tile.group.dtype]
                    kernels.cast(target, dtype, state + inside * FP32, DType.FP32, segment.numel)
