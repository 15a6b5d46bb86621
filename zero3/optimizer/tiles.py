"""Tiles: sub-groups of optimizer state with their homes, and how the state of one lies in memory and on NVMe.

A tile's state is one range of bytes: the master, or its lower half, followed by each of the moments, as exp_avg |
exp_avg_sq. In fp32 the parameter itself is the master; in the split format the parameter is the upper half of the
master and the state holds the lower half (see kernels.h); SGD without momentum has no moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.formats import STATE_FORMATS, round_parameters
from optim_cpu.kernels import StateFormat
from tiering.placement.plan import SubGroup
from tiering.placement.tenants import OPTIMIZER_STATE
from tiering.placement.workload import Workload
from zero3.device.home import Home
from zero3.device.tiers import Tiers
from zero3.params.layout import Segment, segments
from zero3.params.param_group import ParamGroup

FP32 = 4


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
        return STATE_FORMATS[self.moment_format].dtype

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


class SegmentPlace(NamedTuple):
    """A segment of a tile: where it is, in bytes from the beginning of the tile's parameters, state and gradients."""

    piece: int  # its index
    numel: int
    first_index: int
    param: int
    master: int
    moments: tuple[int, ...]
    grad: int


def segment_places(tile: Tile, layout: StateLayout, grad_itemsize: int) -> list[SegmentPlace]:
    """The segments of ``tile``, whose state has this layout."""
    places = []
    for segment, first_index in zip(tile.segments, tile.first_indices, strict=True):
        inside = segment.start - tile.start
        moments = tuple(layout.moment_at(i, tile.numel, inside) for i in range(layout.moments))
        param, master = inside * tile.group.dtype.itemsize, inside * layout.master_itemsize
        place = (
            segment.piece.index,
            segment.numel,
            first_index,
            param,
            master,
            moments,
            inside * grad_itemsize,
        )
        places.append(SegmentPlace(*place))
    return places


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
        nbytes, kept = tiers.plan.tile_state_bytes(planned), tiers.plan.workload.kept_state
        home = tiers.home(planned.tier, nbytes, OPTIMIZER_STATE, names, kept=kept)
        indices = tuple(begins[s.piece.index] + s.first for s in parts)
        tiles.append(Tile(group, planned.start, planned.end, home, parts, indices, planned.visits))
    return tiles
