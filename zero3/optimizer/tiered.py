"""TieredOptimizer: an update rule over tiled state, wherever a tile's bytes live.

State in memory is stepped in place. A tile with bytes on NVMe passes through a staging slot (see slot_transfers.py);
tiles in memory are stepped while its bytes arrive. Usually all tiles are due in ``step``, after the norm of all
gradients is known. With step_in_backward a group's tiles are due when its gradients are final, and tiles that have
arrived are stepped then; backward waits for no tile, unless it needs the room.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.kernels import StepBatch
from optim_cpu.rules import UpdateRule
from tiering.errors import EngineStateError
from zero3.device import kernels as device_kernels
from zero3.device.tiers import Tiers
from zero3.optimizer import update_rules
from zero3.optimizer.deepspeed_names import DeepSpeedOptimizerNames
from zero3.optimizer.device_update import IN_BACKWARD, ROUNDS, DeviceUpdate, OnDevice, part_of
from zero3.optimizer.slot_transfers import SlotTransfers, Staged
from zero3.optimizer.tiles import FP32, StateLayout, StepListener, Tile
from zero3.optimizer.trained import planned_group
from zero3.optimizer.update_rules import OptimizerOptions, Options
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.params.replicas import Replicas
from zero3.passes.gradients import KERNEL_DTYPES, GradientStore

IN_PLACE_NUMEL = 4 << 20
"""Elements stepped in place between two looks at what has arrived: a few milliseconds."""
ON_TIERS = "tiers"  # the key of a state_dict that tells which state belongs to it


class TieredOptimizer(DeepSpeedOptimizerNames, torch.optim.Optimizer):
    """An update rule over tiered state; a true ``torch.optim.Optimizer``, so schedulers and loops can drive it.

    ``step`` needs the gradients of a finished backward; the engine calls it. ``replicas`` are gathered group by group,
    each as soon as all of its tiles that are due were stepped.

    ``state_names`` names the moments that every trained parameter has, in the order in which tiles hold them.
    ``steps`` counts the updates that used them, by parameter (``Piece.index``).
    """

    def __init__(
        self,
        rule: UpdateRule,
        options: OptimizerOptions,
        tiles: list[Tile],
        layout: StateLayout,
        gradients: GradientStore,
        tiers: Tiers,
        replicas: Replicas | None,
    ) -> None:
        super().__init__(options.param_groups, options.defaults)
        if options.source is not None:
            self.param_groups = options.source.param_groups
        self.rule = rule
        self.state_names = update_rules.state_names(rule, self.param_groups)
        self.steps: dict[int, int] = {}
        self._source = options.source
        self._timeline = tiers.timeline
        self._streams = tiers.streams
        self._gradients = gradients
        self._replicas = replicas
        self._layout = layout
        self._on_device: list[Tile] = []  # entirely in a GPU's memory
        self._visiting: list[Tile] = []  # updated by a GPU, through its update window
        self._streamed: list[Tile] = []  # a part of it is in memory that the CPU cannot address
        self._in_place: list[Tile] = []
        self._tiles_of: defaultdict[ParamGroup, list[Tile]] = defaultdict(list)
        for tile in tiles:
            self._tiles_with(tile).append(tile)
            self._tiles_of[tile.group].append(tile)
        self._index_of = {
            param: piece.index
            for group in self._tiles_of
            for piece, param in zip(group.layout.pieces, group.params, strict=True)
            if piece.trainable
        }
        self._transfers = SlotTransfers(gradients, tiers, self._is_stepped)
        self._pipeline = self._transfers.pipeline()
        self._in_slots = frozenset(self._streamed)
        self._visits = DeviceUpdate(gradients, tiers) if self._visiting else None
        self._in_gpu_memory = frozenset(self._on_device)
        # Copies to the device may still read parameters in host memory that the CPU steps.
        self._changes_host_params = tiers.streams is not None and any(
            tile.group.shard_home.on_host for tile in (*self._in_place, *self._streamed)
        )
        self._batch = StepBatch()
        self._on_device_now: list[device_kernels.Segment] = []
        self._numbers: dict[kernels.Rule, int] = {}  # of the rules in the batch
        # Of the step that is under way:
        self._options: list[Options] = []
        self._rules: dict[tuple[int, int], kernels.Rule] = {}  # by param group and step
        self._rule_of: dict[int, kernels.Rule] = {}  # by piece index, if it is stepped
        self._number_of: dict[int, int] = {}  # of the param group, by piece index
        self._grad_scale = 1.0
        self._due_in_place: deque[Tile] = deque()
        self._due_streamed: dict[Tile, None] = {}  # in order
        self._due_visiting: deque[Tile] = deque()
        self._unfinished: Counter[ParamGroup] = Counter()  # tiles that are due
        # With step_in_backward:
        self._backward_order: dict[
            ParamGroup, None
        ] = {}  # groups whose tiles were due in this backward, in order
        self._final_groups: dict[
            ParamGroup, None
        ] = {}  # those whose gradients are still on their way, in order
        self._usual_order: list[ParamGroup] = list(reversed(self._tiles_of))
        self._listener: StepListener | None = None
        gradients.register_stepper(self)

    @property
    def trains(self) -> bool:
        """Whether the model has parameters to update."""
        return self.rule is not update_rules.NONE

    def listen(self, listener: StepListener) -> None:
        """Call ``listener`` from now on before a tile is stepped. There is one listener."""
        self._listener = listener

    def expect_step(self) -> None:
        """The last backward of a step begins: start to read the state of the first tiles."""
        self._pipeline.expect(self._streamed)
        self._pipeline.read_ahead()

    def read_ahead(self) -> None:
        """Continue to read, as far as slots have become free."""
        self._pipeline.read_ahead()

    def begin_in_backward(self, grad_scale: float) -> None:
        """A backward begins that steps each group as soon as its gradients are final, with the current options.

        A bad option raises before any change.
        """
        self._fix_options()
        for number, options in enumerate(self._options):
            self._rule_at(number, options, 1)
        self._grad_scale = grad_scale
        self._backward_order.clear()
        self._final_groups.clear()
        self._pipeline.expect(
            tile for group in self._usual_order for tile in self._tiles_of[group] if tile in self._in_slots
        )
        self._pipeline.read_ahead()

    def group_done(self, group: ParamGroup, *, final: bool) -> None:
        """A backward that steps has left ``group``; ``final``: the group gets no more gradients.

        Gradients that are still being copied from a GPU are waited for when backward has ended: until then the CPU
        has to queue more work for the GPU.
        """
        if final and group in self._tiles_of:
            self._final_groups[group] = None
        # The CPU updates with gradients in host memory: only groups whose copies have arrived are due.
        for each in [each for each in self._final_groups if self._gradients.has_arrived(each)]:
            self._make_due(each)
        self._advance(finish=False)

    def finish_in_backward(self) -> None:
        """The backward has ended: step the remaining groups."""
        # Kernels of this backward are queued and may not have run: the device may still fetch parameters of the
        # remaining groups.
        self._wait_for_copies()
        for group in (*self._final_groups, *self._usual_order):
            if group not in self._backward_order:
                self._make_due(group)
                self._advance(finish=False)
        self._finish()
        self._usual_order = list(self._backward_order)
        self._mark_step_called()

    def release_read_ahead(self) -> None:
        """Free the slots of the tiles that were read ahead, for other users; the step reads them again."""
        # Reads in flight still fill their slots, which come free when these have ended.
        self._pipeline.discard_all()
        self.settle()

    def settle(self) -> None:
        """Wait until host memory holds the updates of the GPU, and the CPU may read and change it."""
        if self._visits is not None:
            self._visits.settle()

    def prepare(self) -> None:
        """Count the next step and derive its rules. A bad option raises before any change."""
        self._fix_options()
        self._count(piece for group in self._tiles_of for piece in group.layout.pieces)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float | None = None
    ) -> None:
        """Update every parameter that got a gradient, gradients multiplied by ``grad_scale`` (unscale x clip).

        Only the engine calls it, after ``prepare``: it also clips, counts, and drops fetched groups. Scripts call
        ``engine.step()``.
        """
        if closure is not None or grad_scale is None:
            raise EngineStateError(self._refusal_to_step())
        # The device may still fetch parameters for its backward.
        self._wait_for_copies()
        self._grad_scale = grad_scale
        for group in self._tiles_of:
            self._add_due(group)
        self._finish()
        self._mark_step_called()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients. Without effect after the engine is closed."""
        if self._ready.closed:
            return
        self.warn_of_dropped_gradients("zero_grad()")
        self._gradients.reset()

    def add_param_group(self, param_group: Options) -> None:
        """Step parameters that are in no group, with these options; they were trainable at initialize."""
        if hasattr(self, "rule"):
            param_group = planned_group(param_group, self._index_of)
            self._rule_at(len(self.param_groups), self.defaults | param_group, 1)  # a bad option raises
        _unwrapped("add_param_group")(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """The options of the param groups, and under "tiers" the step of the state, which stays on the tiers.

        ``engine.save_checkpoint`` saves the state.
        """
        saved: dict[str, Any] = super().state_dict()
        if self.state_names:
            saved[ON_TIERS] = {"step": self._updates.steps, "updates": self._max_updates}
        return saved

    @property
    def _max_updates(self) -> int:
        """The largest number of updates of a parameter, in the state on the tiers."""
        return max(self.steps.values(), default=0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options of the param groups into the same dicts. ``state_dict`` contains no state.

        Raises EngineStateError unless the tiers hold the state of the same step: call ``engine.load_checkpoint`` first.
        """
        if state_dict["state"]:
            raise EngineStateError(
                "optimizer.load_state_dict() cannot load state onto the tiers; pass only options"
                " ({'state': {}, 'param_groups': ...}), and set state with engine.set_fp32_state(name, ...)"
            )
        saved = state_dict.get(ON_TIERS)
        if saved is not None and saved["updates"] != self._max_updates:
            raise EngineStateError(
                f"optimizer.load_state_dict() got the options of step {saved['step']}, where optimizer state had"
                f" {saved['updates']} updates, but the state in this engine has {self._max_updates}. state_dict() of"
                " the optimizer holds no state: save it with engine.save_checkpoint(save_dir), and call"
                " engine.load_checkpoint(save_dir) before this. To load only the options, remove the key"
                f" {ON_TIERS!r} from the dict"
            )
        groups = self.param_groups
        for number, (group, loaded) in enumerate(zip(groups, state_dict["param_groups"], strict=False)):
            for option in ("state_format", "stochastic_rounding"):
                if option in loaded and loaded[option] != group.get(option, loaded[option]):
                    raise EngineStateError(
                        f"optimizer.load_state_dict(): param group {number} was saved with {option}"
                        f" {loaded[option]!r}, but this engine has {group[option]!r}; initialize with the saved value,"
                        " or omit the option"
                    )
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups

    def check_options(self, number: int, options: Options) -> None:
        """Raise TypeError or ValueError if param group ``number`` cannot be stepped with ``options``."""
        if self.trains:
            self._rule_at(number, _scalar_options(options), 1)

    def _rule_at(self, number: int, options: Options, step: int) -> kernels.Rule:
        try:
            rule = self.rule.at(options, step)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.rule.name}, param group {number}: {error}") from None
        if rule.state_count > len(self.state_names):
            raise EngineStateError(
                f"{self.rule.name}, param group {number} has momentum {options['momentum']} now, but had none at"
                " initialize, so it has no momentum_buffer: initialize with a momentum above 0"
            )
        return rule

    def make_room(self) -> bool:
        """Step a tile that is due and may hold a gradient window; False if no tile is due."""
        # The caller may be a group whose gradients are still being copied: it is not due yet.
        if not self._due_streamed:
            return False
        self._step_streamed(next(iter(self._due_streamed)))
        return True

    def _mark_step_called(self) -> None:
        """Mark the step for torch's schedulers, which warn if they step before their optimizer."""
        for stepped in (self, self._source):
            if stepped is not None:
                stepped._opt_called = True  # type: ignore[attr-defined] # torch's own mark

    def _fix_options(self) -> None:
        """Copy the options of the next step, as numbers; later changes apply to the step after it."""
        self._options = [_scalar_options(group) for group in self.param_groups]
        self._number_of = {}
        for number, options in enumerate(self._options):
            for param in options["params"]:
                self._place_in_group(param, number)
        self._rules.clear()
        self._rule_of.clear()

    def _place_in_group(self, param: nn.Parameter, number: int) -> None:
        """Step ``param`` with the options of this group; EngineStateError if another one has it, or it has no state."""
        index = self._index_of.get(param)
        if index is None:
            with torch._C.DisableTorchFunctionSubclass():
                frozen = not param.requires_grad
            if not frozen:
                planned_group({"params": param}, self._index_of)
        elif index in self._number_of:
            raise EngineStateError(
                f"param groups {self._number_of[index]} and {number} have the same parameter, of shape"
                f" {tuple(param.shape)}: each belongs to one group. Take it out of one of them"
            )
        else:
            self._number_of[index] = number

    def _count(self, pieces: Iterable[Piece]) -> None:
        """Count a step of the ``pieces`` that got a gradient, and derive their rules."""
        steps: dict[int, int] = {}
        rule_of: dict[int, kernels.Rule] = {}
        for piece in pieces:
            if not self._gradients.received(piece) or piece.index not in self._number_of:
                continue
            number = self._number_of[piece.index]
            step = self.steps.get(piece.index, 0) + 1
            if self.rule.state_names(self._options[number]):
                steps[piece.index] = step
            if (number, step) not in self._rules:
                self._rules[number, step] = self._rule_at(number, self._options[number], step)
            rule_of[piece.index] = self._rules[number, step]
        self.steps.update(steps)
        self._rule_of.update(rule_of)

    def _is_stepped(self, piece: Piece) -> bool:
        """Whether this step updates the parameter: it got a gradient, and a param group has it."""
        return piece.index in self._rule_of

    def _tiles_with(self, tile: Tile) -> list[Tile]:
        """The list of the tiles that are stepped in the same way as ``tile``."""
        if tile.visits:
            return self._visiting
        if tile.state.on_device:
            return self._on_device
        homes = (tile.state, tile.group.shard_home, self._gradients.homes[tile.group.index])
        return self._in_place if all(home.on_host for home in homes) else self._streamed

    def _make_due(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final, in backward."""
        self._backward_order[group] = None
        self._final_groups.pop(group, None)
        # Before the count: from here on a late gradient is refused, because the update would not contain it.
        self._gradients.complete(group)
        self._count(group.layout.pieces)
        self._add_due(group)
        if not self._unfinished[group]:
            self._gradients.drop_window(group)

    def _add_due(self, group: ParamGroup) -> None:
        """Queue the tiles of ``group`` in which something is stepped."""
        # Only now may gradients be read into slots: the store does not change them any more.
        self._pipeline.final(group)
        for tile in self._tiles_of[group]:
            if any(self._is_stepped(segment.piece) for segment in tile.segments):
                self._unfinished[group] += 1
                if tile in self._in_slots:
                    self._due_streamed[tile] = None
                elif tile.visits:
                    self._due_visiting.append(tile)
                else:
                    self._due_in_place.append(tile)

    def _finish(self) -> None:
        """Step all tiles that are due, or queue them on the device."""
        # Tiles in slots that are not due give them back: nothing else would take them out.
        self._pipeline.expect_only(self._due_streamed)
        self._advance(finish=True)
        self._hold_compute()
        if self._visits is not None:
            # Last: copies to the device that are queued from here on see what the GPU has updated in host memory.
            self._visits.publish()

    def _advance(self, *, finish: bool) -> None:
        """Step due tiles: those that have arrived, else tiles in memory, else (to ``finish``) wait for bytes.

        Before each of them, queue as many tiles on the device as it can begin soon; at the end all of them.
        """
        while True:
            # First: slots that have come free are filled while the CPU computes.
            self._pipeline.read_ahead()
            self._begin_visits(ROUNDS if finish else IN_BACKWARD)
            arrived = self._pipeline.first_arrived(self._due_streamed)
            if arrived is not None:
                self._step_streamed(arrived)
            elif self._due_in_place:
                self._step_in_place()
            elif self._due_streamed and finish:
                self._step_streamed(next(iter(self._due_streamed)))
            elif self._due_visiting and finish:
                self._step_visiting()
            else:
                return

    def _begin_visits(self, rounds: int) -> None:
        """Queue as many tiles on the GPU as it can begin soon."""
        while self._due_visiting and self._visits is not None and self._visits.ready(rounds=rounds):
            self._step_visiting()

    def _step_in_place(self) -> None:
        """Step tiles in memory: all of them, or a few milliseconds of work while other tiles are in transfer."""
        tiles, numel = [], 0
        transfers_due = self._due_streamed or self._due_visiting
        while self._due_in_place and (numel < IN_PLACE_NUMEL or not transfers_due):
            tile = self._due_in_place.popleft()
            tiles.append(tile)
            numel += tile.numel
            if tile in self._in_gpu_memory:
                self._step_on_device(tile)
            else:
                self._add_to_batch(tile, None)
        self._run_batch(f"{numel} elements in memory")
        for tile in tiles:
            self._finish_tile(tile)

    def _step_streamed(self, tile: Tile) -> None:
        """Step a tile in its slot, once its bytes are there, and start to write it back."""
        staged = self._pipeline.acquire(tile)
        del self._due_streamed[tile]
        self._add_to_batch(tile, staged)
        self._run_batch(tile.group.name)
        # Before the group is finished: its last tile lets other ranks gather the parameters that this writes.
        self._pipeline.release(staged)
        self._finish_tile(tile)

    def _finish_tile(self, tile: Tile) -> None:
        self._unfinished[tile.group] -= 1
        if not self._unfinished[tile.group]:
            # Its last tile was updated: nothing reads the gradients any more.
            self._gradients.drop_window(tile.group)
            # In backward, compute does not wait for this copy: it has other kernels to run.
            if not self._backward_order:
                self._hold_compute()
            # After compute was held: a gather is queued behind compute, and must come behind the copies of updated
            # parameters.
            if self._replicas is not None:
                self._replicas.stepped(tile.group)

    def _before_change(self, tile: Tile) -> None:
        if self._listener is not None:
            self._listener.before_change(tile)

    def _add_to_batch(self, tile: Tile, staged: Staged | None) -> None:
        """Add the tile's segments that are stepped."""
        # Before the kernel: a save that is under way copies the tile first.
        self._before_change(tile)
        layout, itemsize = self._layout.for_group(tile.group), tile.group.dtype.itemsize
        grad_dtype = self._gradients.dtype_of(tile.group)
        state = tile.state.address
        if not state and staged is not None:
            state = staged.lease.address
        param, grad = self._transfers.param_address(tile, staged), self._transfers.grad_address(tile, staged)
        separate = layout.master_itemsize == FP32
        for segment, first_index in zip(tile.segments, tile.first_indices, strict=True):
            rule = self._rule_of.get(segment.piece.index)
            if rule is None:
                continue
            inside = segment.start - tile.start
            param_at = param + inside * itemsize
            self._batch.add(
                segment.numel,
                self._rule_number(rule),
                param=state + inside * FP32 if separate else param_at,
                remainder=state + inside * layout.master_itemsize if layout.splits else 0,
                state=tuple(state + layout.moment_at(i, tile.numel, inside) for i in range(layout.moments)),
                state_format=layout.moment_format,
                grad=grad + inside * grad_dtype.itemsize,
                grad_dtype=KERNEL_DTYPES[grad_dtype],
                out=param_at if separate else 0,
                out_dtype=KERNEL_DTYPES[tile.group.dtype],
                first_index=first_index,
            )

    def _run_batch(self, label: str) -> None:
        # Queued on the current stream, behind the kernels that made the gradients.
        device_kernels.step_segments(self._on_device_now, self._grad_scale)
        self._on_device_now.clear()
        if not len(self._batch):
            return
        # The call returns when all segments are updated: their slots may then be written back.
        with self._timeline.span("kernel", label):
            self._batch.run(self._grad_scale)
        self._batch.clear()
        self._numbers.clear()

    def _rule_number(self, rule: kernels.Rule) -> int:
        """The number of ``rule`` in the batch."""
        if rule not in self._numbers:
            self._numbers[rule] = self._batch.add_rule(rule)
        return self._numbers[rule]

    def _wait_for_copies(self) -> None:
        if self._streams is not None and self._changes_host_params:
            # These copies read the parameters that the CPU is about to change.
            self._streams.before_host_changes()

    def _hold_compute(self) -> None:
        """Order later kernels of compute behind the updates of parameters on the device."""
        self._transfers.hold_compute()
        if self._visits is not None:
            self._visits.hold_compute()

    def _step_on_device(self, tile: Tile) -> None:
        """Add a tile in a GPU's memory to its next batch."""
        state, params, grads = (
            tile.state.tensor,
            tile.group.shard_home,
            self._gradients.homes[tile.group.index],
        )
        assert state is not None
        param = part_of(params, tile, tile.group.dtype.itemsize)
        grad = part_of(grads, tile, self._gradients.dtype_of(tile.group).itemsize)
        # Before the kernels are queued: a save has then copied the tile on its own stream.
        self._before_change(tile)
        self._on_device_now += self._segments(OnDevice(tile, state, param, grad))

    def _step_visiting(self) -> None:
        """Queue on the GPU: fetch a tile, step it and copy it back."""
        assert self._visits is not None
        tile = self._due_visiting.popleft()
        stepped = [
            range(segment.start - tile.start, segment.start - tile.start + segment.numel)
            for segment in tile.segments
            if self._is_stepped(segment.piece)
        ]
        if len(stepped) == len(tile.segments):  # one copy, with the padding between the segments
            stepped = [range(tile.numel)]
        # Before the copies back to host memory are queued, which change the tile at home.
        self._before_change(tile)
        self._visits.run(tile, stepped, self._run_on_device)
        self._finish_tile(tile)

    def _run_on_device(self, tile: OnDevice) -> None:
        device_kernels.step_segments(self._segments(tile), self._grad_scale)

    def _segments(self, tile: OnDevice) -> list[device_kernels.Segment]:
        group = tile.tile.group
        return tile.segments(self._layout.for_group(group), self._rule_of, self._gradients.dtype_of(group))


def _scalar_options(options: Options) -> Options:
    """``options`` with numbers in place of tensors of one element."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def _unwrapped(method: str) -> Any:
    """A method of torch's optimizers without torch's wrapper, which would import the compiler (one second)."""
    return inspect.unwrap(getattr(torch.optim.Optimizer, method))
