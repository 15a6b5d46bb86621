"""TileBatch: tiles that the kernels step in one call, each wherever its bytes are at that moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.kernels import Segment, StepBatch
from zero3.device import kernels as device_kernels
from zero3.device.timeline import Timeline
from zero3.optimizer.device_update import OnDevice, part_of
from zero3.optimizer.slot_transfers import SlotTransfers, Staged
from zero3.optimizer.tiles import FP32, SegmentPlace, StateLayout, Tile, segment_places
from zero3.passes.gradients import GradientStore


class TileBatch:
    """Tiles of one step, with their rules by piece index: what has no rule is not stepped.

    What is the same in every step is kept: the places of segments, and their descriptions for a GPU.
    """

    def __init__(
        self, layout: StateLayout, gradients: GradientStore, transfers: SlotTransfers, timeline: Timeline
    ) -> None:
        self._layout = layout
        self._gradients = gradients
        self._transfers = transfers
        self._timeline = timeline
        self._on_cpu = StepBatch()
        self._added: list[Segment] = []  # that are not in it yet
        self._numbers: dict[kernels.Rule, int] = {}  # of the rules in it
        self._places: dict[Tile, list[SegmentPlace]] = {}
        self._on_device: list[device_kernels.Segment] = []
        # Of tiles in a GPU's memory, by piece index: their memory does not move, so each is described to CUDA once.
        self._resident: defaultdict[Tile, dict[int, device_kernels.Segment]] = defaultdict(dict)

    def __len__(self) -> int:
        """The number of segments that the CPU steps."""
        return len(self._on_cpu) + len(self._added)

    def clear(self) -> None:
        """Empty the batch; an exception may have left tiles in it that were not stepped."""
        self._on_cpu.clear()
        self._added.clear()
        self._numbers.clear()
        self._on_device.clear()

    def add(self, tile: Tile, staged: Staged | None, rule_of: Mapping[int, kernels.Rule]) -> None:
        """Add a tile in host memory or in the slot of ``staged``."""
        layout, grad_dtype = self._layout.for_group(tile.group), self._gradients.dtype_of(tile.group)
        places = self._places.get(tile)
        if places is None:
            places = self._places[tile] = segment_places(tile, layout, grad_dtype.itemsize)
        state = tile.state.address
        if not state and staged is not None:
            state = staged.lease.address
        param, grad = self._transfers.param_address(tile, staged), self._transfers.grad_address(tile, staged)
        separate = layout.master_itemsize == FP32
        for place in places:
            rule = rule_of.get(place.piece)
            if rule is None:
                continue
            state0, state1 = (*(state + moment for moment in place.moments), 0, 0)[:2]
            self._added.append(
                Segment(
                    rule=self._number_of(rule),
                    numel=place.numel,
                    param=state + place.master if separate else param + place.param,
                    remainder=state + place.master if layout.splits else 0,
                    state0=state0,
                    state1=state1,
                    state_format=layout.moment_format,
                    grad=grad + place.grad,
                    grad_dtype=DTYPES[grad_dtype],
                    out=param + place.param if separate else 0,
                    out_dtype=DTYPES[tile.group.dtype],
                    first_index=place.first_index,
                )
            )

    def add_on_device(self, tile: Tile, rule_of: Mapping[int, kernels.Rule]) -> None:
        """Add a tile in a GPU's memory."""
        stepped = [segment.piece.index for segment in tile.segments if segment.piece.index in rule_of]
        segments = self._resident[tile]
        if not segments.keys() >= set(stepped):
            params, grads = tile.group.shard_home, self._gradients.homes[tile.group.index]
            state = tile.state.tensor
            assert state is not None
            param = part_of(params, tile, tile.group.dtype.itemsize)
            grad = part_of(grads, tile, self._gradients.dtype_of(tile.group).itemsize)
            segments |= self._segments(OnDevice(tile, state, param, grad), rule_of)
        for index in stepped:
            segments[index].rule = rule_of[index]
            self._on_device.append(segments[index])

    def run(self, grad_scale: float, label: str) -> None:
        """Step what was added; gradients are multiplied by ``grad_scale``. What a GPU has may be stepped later."""
        if self._on_device:
            # Queued on the current stream, behind the kernels that made the gradients.
            device_kernels.step_segments(self._on_device, grad_scale)
        if not len(self):
            return
        self._fill()
        # The call returns when all segments are updated: their slots may then be written back.
        with self._timeline.span("kernel", label):
            self._on_cpu.run(grad_scale)

    def part(self, first: int, count: int, grad_scale: float) -> kernels.PreparedStep:
        """``count`` segments that the CPU steps, from ``first`` on, to be run by others."""
        self._fill()
        return self._on_cpu.part(first, count, grad_scale)

    def step_visitor(self, tile: OnDevice, rule_of: Mapping[int, kernels.Rule], grad_scale: float) -> None:
        """Queue the kernels of a tile that visits a GPU, without the batch."""
        device_kernels.step_segments(list(self._segments(tile, rule_of).values()), grad_scale)

    def _segments(
        self, tile: OnDevice, rule_of: Mapping[int, kernels.Rule]
    ) -> dict[int, device_kernels.Segment]:
        group = tile.tile.group
        return tile.segments(self._layout.for_group(group), rule_of, self._gradients.dtype_of(group))

    def _fill(self) -> None:
        """Move what was added into the CPU's batch, in one call of C for all tiles."""
        if self._added:
            self._on_cpu.add_all(self._added)
            self._added.clear()

    def _number_of(self, rule: kernels.Rule) -> int:
        """The number of ``rule`` in the CPU's batch."""
        if rule not in self._numbers:
            self._numbers[rule] = self._on_cpu.add_rule(rule)
        return self._numbers[rule]
