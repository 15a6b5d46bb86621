"""TieredOptimizer: read, step and write sub-groups of optimizer state, several in flight.

A *tile* is a sub-group with its state's home. State in memory is stepped in place, in one batch. A tile with bytes on
NVMe passes through a staging slot: its state is read, one fused kernel updates it and writes the 16-bit parameter, and
both are written back while the next tiles are read and stepped. Reads of the first tiles start during backward; the
last writes run on into the next forward, and storage.py makes a read of the same bytes wait for them.

A staging slot holds, each part at a multiple of 4096 bytes: optimizer state | parameter | gradient, as far as they live
on NVMe. State is the master and then what the update rule keeps, as exp_avg | exp_avg_sq; in fp32 the parameter itself
is the master, and SGD without momentum has no state at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType, StepBatch
from tiering.arena import Completion, Lease
from tiering.errors import EngineStateError
from tiering.plan import SubGroup
from tiering.tickets import AllOf, Transfer
from zero3 import device_kernels
from zero3.flat_storage import StreamEvent, Streams
from zero3.grads import KERNEL_DTYPES, GradientStore
from zero3.param_group import ParamGroup
from zero3.partition import Segment, segments
from zero3.rules import Options, UpdateRule
from zero3.tiers import Home, Tiers, as_tensor

FP32 = 4


@dataclass(eq=False)
class Tile:
    """A sub-group: flat elements [start, end) of ``group``, its segments, and where its optimizer state lives."""

    group: ParamGroup
    start: int
    end: int
    state: Home
    segments: tuple[Segment, ...]

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(eq=False)
class _Staged:
    """A tile in a staging slot. Addresses point into the slot, or at the home of what lives in memory."""

    tile: Tile
    lease: Lease
    reads: list[Transfer] = field(default_factory=list)


def make_tiles(sub_groups: Iterable[SubGroup], groups: list[ParamGroup], tiers: Tiers) -> list[Tile]:
    """The planned sub-groups with homes for their state."""
    made = []
    for planned in sub_groups:
        group = groups[planned.group]
        parts = tuple(segments(group.layout.pieces, planned.start, planned.end))
        names = tuple(segment.piece.name for segment in parts)
        nbytes = planned.numel * tiers.plan.workload.state_itemsize
        home = tiers.home(planned.tier, nbytes, "optimizer state", names)
        made.append(Tile(group, planned.start, planned.end, home, parts))
    return made


class TieredOptimizer(torch.optim.Optimizer):
    """An update rule over tiered state; a true ``torch.optim.Optimizer``, so schedulers and loops can drive it.

    ``param_groups`` carry the rule's options as torch's do, each group its own. Of an optimizer that the user made
    (``taken_over``) they are the same list of the same dicts: a scheduler made for either steers both. ``step`` needs
    the gradients of a finished backward; the engine calls it.

    ``state_names`` names the state tensors that every trained parameter has, in the order in which tiles hold them.
    ``steps`` counts the updates that used them, by parameter (``Piece.index``).
    """

    def __init__(
        self,
        param_groups: list[Options],
        defaults: Options,
        rule: UpdateRule,
        tiles: list[Tile],
        gradients: GradientStore,
        tiers: Tiers,
        streams: Streams | None,
        taken_over: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(param_groups, defaults)
        if taken_over is not None:
            self.param_groups = taken_over.param_groups
        self.rule = rule
        self.state_names = rule.state_names(self.param_groups)
        self.steps: dict[int, int] = {}
        self._taken_over = taken_over
        self._tiers = tiers
        self._streams = streams
        self._gradients = gradients
        self._param_at = tiers.plan.staging.param_offset
        self._grad_at = tiers.plan.staging.grad_offset
        self._master_is_param = tiers.plan.workload.master_is_param
        self._on_device: list[Tile] = []  # state on a GPU
        self._streamed: list[Tile] = []  # a part of it is where the CPU cannot address it
        self._in_place: list[Tile] = []
        for tile in tiles:
            self._way_of(tile).append(tile)
        self._pieces = {s.piece.index: s.piece for tile in tiles for s in tile.segments}
        self._index_of = {
            param: piece.index
            for group in {tile.group for tile in tiles}
            for piece, param in zip(group.layout.pieces, group.params, strict=True)
        }
        self._rule_of: dict[int, kernels.Rule] = {}  # piece index -> as of this step, if it got a gradient
        self._ahead: deque[_Staged] = deque()
        self._batch = StepBatch()
        self._numbers: dict[kernels.Rule, int] = {}  # of the rules in the batch

    def read_ahead(self) -> None:
        """Start to read the state of the first tiles; called when the last backward of a step begins."""
        while len(self._ahead) < len(self._streamed):
            staged = self._stage(self._streamed[len(self._ahead)], wait=False)
            if staged is None:
                return
            self._ahead.append(staged)

    def release_read_ahead(self) -> None:
        """Free the slots of ``read_ahead``, for others to use; the step reads again."""
        while self._ahead:
            staged = self._ahead.popleft()
            staged.lease.retire(AllOf[Completion](list(staged.reads)))

    def prepare(self) -> None:
        """Count the step that comes and derive its rules. A bad option raises, and nothing has changed."""
        steps = dict(self.steps)
        known: dict[tuple[int, int], kernels.Rule] = {}
        self._rule_of = {}
        for number, options in enumerate(self.param_groups):
            counts = bool(self.rule.keeps(options))
            for param in options["params"]:
                index = self._index_of.get(param)
                if index not in self._pieces or not self._gradients.received(self._pieces[index]):
                    continue
                step = steps.get(index, 0) + 1
                if counts:
                    steps[index] = step
                if (number, step) not in known:
                    known[number, step] = self._rule_at(number, options, step)
                self._rule_of[index] = known[number, step]
        self.steps = steps

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float | None = None
    ) -> None:
        """Update every parameter that got a gradient, gradients multiplied by ``grad_scale`` (unscale x clip).

        For the engine alone, which also clips, counts and drops what it has fetched, after ``prepare``: call
        ``engine.step()``.
        """
        if closure is not None or grad_scale is None:
            raise EngineStateError(
                "optimizer.step() would neither clip nor count this step; call engine.step()"
            )
        if self._streams is not None:
            # Nothing has waited for a forward without gradients: it may still read what changes in host memory now.
            self._streams.fetch.synchronize()
        self.read_ahead()
        for tile in self._in_place:
            self._add_to_batch(tile, tile.state.address, 0, 0)
        self._run_batch(grad_scale)
        for tile in self._on_device:
            self._step_on_device(tile, grad_scale)

        upcoming = deque(self._streamed[len(self._ahead) :])
        while self._ahead or upcoming:
            while upcoming and (staged := self._stage(upcoming[0], wait=not self._ahead)) is not None:
                self._ahead.append(staged)
                upcoming.popleft()
            self._update(self._ahead.popleft(), grad_scale)
        if self._taken_over is not None:
            self._taken_over._opt_called = True  # type: ignore[attr-defined] # its schedulers ask

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far."""
        self._gradients.reset()
        super().zero_grad(set_to_none=True)

    def add_param_group(self, param_group: Options) -> None:
        """For construction alone: tiers are planned once."""
        if hasattr(self, "rule"):
            raise EngineStateError(
                "a param group was added after initialize, but nothing holds its parameters' state: initialize with all"
                " of them"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the options of the param groups; they stay the same dicts. State is on the tiers, not in here."""
        if state_dict["state"]:
            raise EngineStateError(
                "optimizer.load_state_dict() cannot bring state onto the tiers; give it options alone"
                " ({'state': {}, 'param_groups': ...}), and state to engine.set_fp32_state, by parameter"
            )
        kept = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(kept, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = kept

    def _rule_at(self, number: int, options: Options, step: int) -> kernels.Rule:
        try:
            rule = self.rule.at(options, step)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.rule.name}, param group {number}: {error}") from None
        if rule.state_count > len(self.state_names):
            raise EngineStateError(
                f"{self.rule.name}, param group {number} has momentum {options['momentum']} now, but had none at"
                " initialize, so nothing keeps its momentum_buffer: initialize with a momentum above 0"
            )
        return rule

    def _way_of(self, tile: Tile) -> list[Tile]:
        """The list of the tiles that are stepped as this one has to be."""
        if tile.state.tensor is not None and not tile.state.on_host:
            return self._on_device
        homes = (tile.state, tile.group.home, self._gradients.homes[tile.group.index])
        return self._in_place if all(home.on_host for home in homes) else self._streamed

    def _stage(self, tile: Tile, *, wait: bool) -> _Staged | None:
        """Lease a slot for ``tile`` and start to read what does not change before the step."""
        staging = self._tiers.staging
        lease = staging.try_lease(self._tiers.plan.staging.slot_bytes, "staging")
        if lease is None:
            if not wait:
                return None
            with self._tiers.stalls.waiting_for("staging"):
                lease = staging.lease(self._tiers.plan.staging.slot_bytes, "staging")
        staged = _Staged(tile, lease)
        try:
            self._start_reads(staged)
        except BaseException:
            lease.retire(AllOf[Completion](list(staged.reads)))
            raise
        return staged

    def _start_reads(self, staged: _Staged) -> None:
        tile, home, itemsize = staged.tile, staged.tile.group.home, staged.tile.group.dtype.itemsize
        if tile.state.extent is not None:
            self._read(staged, tile.state, 0, 0, tile.state.extent.nbytes)
        if self._master_is_param and home.extent is not None:
            self._read(staged, home, self._param_at, tile.start * itemsize, tile.numel * itemsize)
        elif self._master_is_param and home.tensor is not None and not home.on_host:
            source = home.tensor[tile.start * itemsize : tile.end * itemsize]
            as_tensor(staged.lease)[self._param_at :][: source.numel()].copy_(source)

    def _read(self, staged: _Staged, home: Home, slot_offset: int, offset: int, nbytes: int) -> None:
        assert home.extent is not None and self._tiers.swap is not None
        part = staged.lease.part(slot_offset, nbytes)
        staged.reads.append(self._tiers.swap.swap_in(home.extent, part, offset=offset))

    def _update(self, staged: _Staged, grad_scale: float) -> None:
        """Step one staged tile and start to write it back."""
        tile, lease = staged.tile, staged.lease
        grads = self._gradients.homes[tile.group.index]
        itemsize = self._gradients.dtype.itemsize
        if grads.extent is not None:
            self._read(staged, grads, self._grad_at, tile.start * itemsize, tile.numel * itemsize)
        with self._tiers.stalls.waiting_for("optimizer state"):
            for ticket in staged.reads:
                ticket.wait()
        self._add_to_batch(
            tile,
            tile.state.address or lease.address,
            0 if tile.group.home.on_host else lease.address + self._param_at,
            0 if grads.on_host else lease.address + self._grad_at - tile.start * itemsize,
        )
        touched = len(self._batch) > 0
        self._run_batch(grad_scale)
        if touched:
            self._complete_parameters(staged)
        lease.retire(AllOf[Completion](self._write_back(staged) if touched else []))

    def _complete_parameters(self, staged: _Staged) -> None:
        """Fill in the 16-bit parameters that were not stepped: a slot is written back whole, and held none of them.

        They are their masters rounded, always.
        """
        tile, lease = staged.tile, staged.lease
        if self._master_is_param or tile.group.home.on_host:
            return
        state = tile.state.address or lease.address
        for segment in tile.segments:
            if not self._gradients.received(segment.piece):
                inside = segment.start - tile.start
                target = lease.address + self._param_at + inside * tile.group.dtype.itemsize
                if tile.group.dtype is torch.bfloat16:
                    kernels.split(target, 0, state + inside * FP32, segment.numel)
                else:
                    dtype = KERNEL_DTYPES[tile.group.dtype]
                    kernels.cast(target, dtype, state + inside * FP32, DType.FP32, segment.numel)

    def _write_back(self, staged: _Staged) -> list[Completion]:
        """Start to write what the step changed and what lives elsewhere."""
        tile, swap = staged.tile, self._tiers.swap
        home, writes = tile.group.home, list[Completion]()
        itemsize = tile.group.dtype.itemsize
        if tile.state.extent is not None:
            assert swap is not None
            writes.append(swap.swap_out(tile.state.extent, staged.lease.part(0, tile.state.extent.nbytes)))
        if not home.on_host:
            part = staged.lease.part(self._param_at, tile.numel * itemsize)
            if home.extent is not None:
                assert swap is not None
                writes.append(swap.swap_out(home.extent, part, offset=tile.start * itemsize))
            else:
                assert home.tensor is not None
                source = as_tensor(staged.lease)[self._param_at : self._param_at + part.nbytes]
                home.tensor[tile.start * itemsize :][: part.nbytes].copy_(source, non_blocking=True)
                writes.append(StreamEvent(torch.cuda.current_stream()))
        return writes

    def _add_to_batch(self, tile: Tile, state: int, param: int, grads: int) -> None:
        """Add the tile's segments that got gradients. ``state`` is the address of the tile's state; ``param`` that of
        the tile's parameters, ``grads`` that of the *group's* gradients, 0 where they are in their home."""
        itemsize = tile.group.dtype.itemsize
        param = param or tile.group.home.address + tile.start * itemsize
        grads = grads or self._gradients.homes[tile.group.index].address
        moments = state if self._master_is_param else state + tile.numel * FP32
        for segment in tile.segments:
            if not self._gradients.received(segment.piece):
                continue
            inside = segment.start - tile.start
            self._batch.add(
                segment.numel,
                self._number(self._rule_of[segment.piece.index]),
                param=(param if self._master_is_param else state) + inside * FP32,
                state=tuple(moments + (i * tile.numel + inside) * FP32 for i in range(len(self.state_names))),
                grad=grads + segment.start * self._gradients.dtype.itemsize,
                grad_dtype=KERNEL_DTYPES[self._gradients.dtype],
                out=0 if self._master_is_param else param + inside * itemsize,
                out_dtype=KERNEL_DTYPES[tile.group.dtype],
            )

    def _run_batch(self, grad_scale: float) -> None:
        self._batch.run(grad_scale)
        self._batch.clear()
        self._numbers.clear()

    def _number(self, rule: kernels.Rule) -> int:
        """The number of ``rule`` in the batch."""
        if rule not in self._numbers:
            self._numbers[rule] = self._batch.add_rule(rule)
        return self._numbers[rule]

    def _step_on_device(self, tile: Tile, grad_scale: float) -> None:
        """Step a tile whose state is in a GPU's memory, by torch operations."""
        param, grads = tile.group.home.tensor, self._gradients.homes[tile.group.index].tensor
        assert tile.state.tensor is not None and param is not None and grads is not None
        own = () if self._master_is_param else ("master",)
        state = tile.state.tensor.view(torch.float32).view(len(own) + len(self.state_names), tile.numel)
        whole = param.view(tile.group.dtype)[tile.start : tile.end]
        for segment in tile.segments:
            if not self._gradients.received(segment.piece):
                continue
            inside = slice(segment.start - tile.start, segment.start - tile.start + segment.numel)
            device_kernels.step(
                self._rule_of[segment.piece.index],
                whole[inside] if self._master_is_param else state[0, inside],
                state[len(own) :, inside].unbind(),
                grads.view(self._gradients.dtype)[segment.start : segment.start + segment.numel],
                out=None if self._master_is_param else whole[inside],
                grad_scale=grad_scale,
            )
