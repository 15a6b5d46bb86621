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
from tiering.errors import EngineStateError
from zero3.device import kernels as device_kernels
from zero3.device.tiers import Tiers
from zero3.optimizer import update_rules
from zero3.optimizer.deepspeed_names import DeepSpeedOptimizerNames
from zero3.optimizer.device_update import IN_BACKWARD, ROUNDS, DeviceUpdate, OnDevice, part_of
from zero3.optimizer.slot_transfers import SlotTransfers, Staged
from zero3.optimizer.tiles import FP32, StateLayout, StepListener, Tile
from zero3.optimizer.trained import planned_group
from zero3.optimizer.update_rules import OptimizerOptions, Options, UpdateRule
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
        taken_over = options.taken_over
        if taken_over is not None:
            self.param_groups = taken_over.param_groups
        self.rule = rule
        self.state_names = rule.state_names(self.param_groups)
        self.steps: dict[int, int] = {}
        self._taken_over = taken_over
        self._timeline = tiers.timeline
        self._streams = tiers.streams
        self._gradients = gradients
        self._replicas = replicas
        self._layout = layout
        self._on_device: list[Tile] = []  # all of it in a GPU's memory
        self._visiting: list[Tile] = []  # updated there, too
        self._streamed: list[Tile] = []  # a part of it is where the CPU cannot address it
        self._in_place: list[Tile] = []
        self._tiles_of: defaultdict[ParamGroup, list[Tile]] = defaultdict(list)
        for tile in tiles:
            self._way_of(tile).append(tile)
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
        self._begun: dict[ParamGroup, None] = {}  # groups whose tiles were due in this backward, in order
        self._final: dict[ParamGroup, None] = {}  # those whose gradients are still on their way, in order
        self._usual_order: list[ParamGroup] = list(reversed(self._tiles_of))
        self._listener: StepListener | None = None
        gradients.register_stepper(self)

    @property
    def trains(self) -> bool:
        """Whether there is anything to update, ever."""
        return self.rule is not update_rules.NONE

    def listen(self, listener: StepListener) -> None:
        """Call ``listener`` from now on before a tile is stepped. There is one listener."""
        self._listener = listener

    def expect_step(self) -> None:
        """The last backward of a step begins: start to read the state of the first tiles."""
        self._pipeline.expect(self._streamed)
        self._pipeline.read_ahead()

    def read_ahead(self) -> None:
        """Go on to read, as far as slots have come free."""
        self._pipeline.read_ahead()

    def begin_in_backward(self, grad_scale: float) -> None:
        """A backward begins that steps each group as soon as its gradients are final. Options are as of now.

        A bad option raises, and nothing has changed.
        """
        self._fix_options()
        for number, options in enumerate(self._options):
            self._rule_at(number, options, 1)
        self._grad_scale = grad_scale
        self._begun.clear()
        self._final.clear()
        self._pipeline.expect(
            tile for group in self._usual_order for tile in self._tiles_of[group] if tile in self._in_slots
        )
        self._pipeline.read_ahead()

    def group_done(self, group: ParamGroup, *, final: bool) -> None:
        """A backward that steps has left ``group``; ``final`` says that no gradient of it can come any more.

        Those that are still leaving a GPU are waited for when backward has ended: the GPU has more to be told.
        """
        if final and group in self._tiles_of:
            self._final[group] = None
        for each in [each for each in self._final if self._gradients.has_arrived(each)]:
            self._make_due(each)
        self._advance(finish=False)

    def finish_in_backward(self) -> None:
        """The backward has ended: step the groups that it could not step before."""
        self._wait_for_copies()
        for group in (*self._final, *self._usual_order):
            if group not in self._begun:
                self._make_due(group)
                self._advance(finish=False)
        self._finish()
        self._usual_order = list(self._begun)
        self._tell_schedulers()

    def release_read_ahead(self) -> None:
        """Free the slots of what was read ahead, for others to use; the step reads again."""
        self._pipeline.discard_all()
        self.settle()

    def settle(self) -> None:
        """Wait until host memory holds what a GPU has updated, and may be read and changed by the CPU."""
        if self._visits is not None:
            self._visits.settle()

    def prepare(self) -> None:
        """Count the step that comes and derive its rules. A bad option raises, and nothing has changed."""
        self._fix_options()
        self._count(piece for group in self._tiles_of for piece in group.layout.pieces)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scale: float | None = None
    ) -> None:
        """Update every parameter that got a gradient, gradients multiplied by ``grad_scale`` (unscale x clip).

        For the engine alone, which also clips, counts and drops what it has fetched, after ``prepare``: call
        ``engine.step()``.
        """
        if closure is not None or grad_scale is None:
            raise EngineStateError(self._refusal_to_step())
        self._wait_for_copies()
        self._grad_scale = grad_scale
        for group in self._tiles_of:
            self._add_due(group)
        self._finish()
        self._tell_schedulers()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients accumulated so far; after the engine's end there are none."""
        if self._ready.closed:
            return
        self.tell_of_dropping("zero_grad()")
        self._gradients.reset()

    def add_param_group(self, param_group: Options) -> None:
        """Step parameters that are in no group (any more), with these options: of those that were trained at first."""
        if hasattr(self, "rule"):
            param_group = planned_group(param_group, self._index_of)
            self._rule_at(len(self.param_groups), self.defaults | param_group, 1)  # a bad option raises
        _torchs("add_param_group")(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """The options of the param groups, and under "tiers" of which step the state is, which stays on the tiers.

        ``engine.save_checkpoint`` saves the state.
        """
        saved: dict[str, Any] = super().state_dict()
        if self.state_names:
            saved[ON_TIERS] = {"step": self._updates.steps, "updates": self._most_updates}
        return saved

    @property
    def _most_updates(self) -> int:
        """Of a parameter, in the state that is on the tiers."""
        return max(self.steps.values(), default=0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the options of the param groups; they stay the same dicts. State is on the tiers, not in here.

        EngineStateError unless the state of that ``state_dict`` is on the tiers: ``engine.load_checkpoint`` comes
        first.
        """
        if state_dict["state"]:
            raise EngineStateError(
                "optimizer.load_state_dict() cannot bring state onto the tiers; give it options alone"
                " ({'state': {}, 'param_groups': ...}), and state to engine.set_fp32_state, by parameter"
            )
        saved = state_dict.get(ON_TIERS)
        if saved is not None and saved["updates"] != self._most_updates:
            raise EngineStateError(
                f"optimizer.load_state_dict() got the options of step {saved['step']}, where optimizer state had"
                f" {saved['updates']} updates, but the state in this engine has {self._most_updates}. state_dict() of"
                " the optimizer holds no state: save it by engine.save_checkpoint(save_dir), and call"
                " engine.load_checkpoint(save_dir) before this. To load the options alone, take the key"
                f" {ON_TIERS!r} out of the dict"
            )
        kept = self.param_groups
        for number, (group, loaded) in enumerate(zip(kept, state_dict["param_groups"], strict=False)):
            for option in ("state_format", "stochastic_rounding"):
                if option in loaded and loaded[option] != group.get(option, loaded[option]):
                    raise EngineStateError(
                        f"optimizer.load_state_dict(): param group {number} was saved with {option}"
                        f" {loaded[option]!r}, but its state is kept with {group[option]!r}; initialize with the saved"
                        " one, or leave the option out"
                    )
        super().load_state_dict(state_dict)
        for group, loaded in zip(kept, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = kept

    def check_options(self, number: int, options: Options) -> None:
        """Raise TypeError or ValueError if param group ``number`` cannot be stepped with ``options``."""
        if self.trains:
            self._rule_at(number, _numbers(options), 1)

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

    def make_room(self) -> bool:
        """Step a tile that is due and may hold a gradient window; False if no tile is due."""
        if not self._due_streamed:  # a group whose gradients are still on their way may be the one that asks
            return False
        self._step_streamed(next(iter(self._due_streamed)))
        return True

    def _tell_schedulers(self) -> None:
        """torch's ask whether their optimizer has stepped before them."""
        for stepped in (self, self._taken_over):
            if stepped is not None:
                stepped._opt_called = True  # type: ignore[attr-defined] # torch's own mark

    def _fix_options(self) -> None:
        """Take the options of the step that comes, as numbers; later changes are for the next one."""
        self._options = [_numbers(group) for group in self.param_groups]
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
        """Count a step of those ``pieces`` that got a gradient, and note the rules that they are stepped by."""
        steps: dict[int, int] = {}
        rule_of: dict[int, kernels.Rule] = {}
        for piece in pieces:
            if not self._gradients.received(piece) or piece.index not in self._number_of:
                continue
            number = self._number_of[piece.index]
            step = self.steps.get(piece.index, 0) + 1
            if self.rule.keeps(self._options[number]):
                steps[piece.index] = step
            if (number, step) not in self._rules:
                self._rules[number, step] = self._rule_at(number, self._options[number], step)
            rule_of[piece.index] = self._rules[number, step]
        self.steps.update(steps)
        self._rule_of.update(rule_of)

    def _is_stepped(self, piece: Piece) -> bool:
        """Whether this step updates the parameter: it got a gradient, and a param group has it."""
        return piece.index in self._rule_of

    def _way_of(self, tile: Tile) -> list[Tile]:
        """The list of the tiles that are stepped as this one has to be."""
        if tile.visits:
            return self._visiting
        if tile.state.on_device:
            return self._on_device
        homes = (tile.state, tile.group.shard_home, self._gradients.homes[tile.group.index])
        return self._in_place if all(home.on_host for home in homes) else self._streamed

    def _make_due(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final, in backward."""
        self._begun[group] = None
        self._final.pop(group, None)
        self._gradients.complete(group)
        self._count(group.layout.pieces)
        self._add_due(group)
        if not self._unfinished[group]:
            self._gradients.drop_window(group)

    def _add_due(self, group: ParamGroup) -> None:
        """Queue the tiles of ``group`` in which something is stepped."""
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
        """Step all that is due, or tell the device to."""
        self._pipeline.expect_only(self._due_streamed)
        self._advance(finish=True)
        self._show()
        if self._visits is not None:
            self._visits.publish()

    def _advance(self, *, finish: bool) -> None:
        """Step what is due: tiles whose bytes are there, else tiles in memory, else (to ``finish``) wait for bytes.

        Before each of them, the device is told as many as it can begin soon; in the end all.
        """
        while True:
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
        """Tell the GPU of as many tiles as it can begin soon."""
        while self._due_visiting and self._visits is not None and self._visits.ready(rounds=rounds):
            self._step_visiting()

    def _step_in_place(self) -> None:
        """Step tiles that are in memory: all of them, or as many as bytes on their way leave time for."""
        tiles, numel = [], 0
        others = self._due_streamed or self._due_visiting
        while self._due_in_place and (numel < IN_PLACE_NUMEL or not others):
            tile = self._due_in_place.popleft()
            tiles.append(tile)
            numel += tile.numel
            if tile in self._in_gpu_memory:
                self._step_on_device(tile)
            else:
                self._add_to_batch(tile, None)
        self._run_batch(f"{numel} elements in memory")
        for tile in tiles:
            self._finished(tile)

    def _step_streamed(self, tile: Tile) -> None:
        """Step a tile in its slot, once its bytes are there, and start to write it back."""
        staged = self._pipeline.acquire(tile)
        del self._due_streamed[tile]
        self._add_to_batch(tile, staged)
        self._run_batch(tile.group.name)
        self._pipeline.release(staged)
        self._finished(tile)

    def _finished(self, tile: Tile) -> None:
        self._unfinished[tile.group] -= 1
        if not self._unfinished[tile.group]:
            self._gradients.drop_window(tile.group)
            if not self._begun:  # in backward compute has other things to do than to wait for this
                self._show()
            if self._replicas is not None:
                self._replicas.stepped(tile.group)

    def _before_change(self, tile: Tile) -> None:
        if self._listener is not None:
            self._listener.before_change(tile)

    def _add_to_batch(self, tile: Tile, staged: Staged | None) -> None:
        """Add the tile's segments that are stepped."""
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
            here = param + inside * itemsize
            self._batch.add(
                segment.numel,
                self._number(rule),
                param=state + inside * FP32 if separate else here,
                remainder=state + inside * layout.master_itemsize if layout.splits else 0,
                state=tuple(state + layout.moment_at(i, tile.numel, inside) for i in range(layout.moments)),
                state_format=layout.moment_format,
                grad=grad + inside * grad_dtype.itemsize,
                grad_dtype=KERNEL_DTYPES[grad_dtype],
                out=here if separate else 0,
                out_dtype=KERNEL_DTYPES[tile.group.dtype],
                first_index=first_index,
            )

    def _run_batch(self, what: str) -> None:
        device_kernels.step_segments(self._on_device_now, self._grad_scale)
        self._on_device_now.clear()
        if not len(self._batch):
            return
        with self._timeline.span("kernel", what):
            self._batch.run(self._grad_scale)
        self._batch.clear()
        self._numbers.clear()

    def _number(self, rule: kernels.Rule) -> int:
        """The number of ``rule`` in the batch."""
        if rule not in self._numbers:
            self._numbers[rule] = self._batch.add_rule(rule)
        return self._numbers[rule]

    def _wait_for_copies(self) -> None:
        if self._streams is not None and self._changes_host_params:
            self._streams.before_host_changes()

    def _show(self) -> None:
        """What compute is told from now on is with the parameters on the device that were stepped so far."""
        self._transfers.hold_compute()
        if self._visits is not None:
            self._visits.show()

    def _step_on_device(self, tile: Tile) -> None:
        """Add a tile that is in a GPU's memory to what it steps next."""
        state, params, grads = (
            tile.state.tensor,
            tile.group.shard_home,
            self._gradients.homes[tile.group.index],
        )
        assert state is not None
        param = part_of(params, tile, tile.group.dtype.itemsize)
        grad = part_of(grads, tile, self._gradients.dtype_of(tile.group).itemsize)
        self._before_change(tile)
        self._on_device_now += self._segments(OnDevice(tile, state, param, grad))

    def _step_visiting(self) -> None:
        """Tell the GPU to fetch a tile, to step it and to bring it back."""
        assert self._visits is not None
        tile = self._due_visiting.popleft()
        stepped = [
            range(segment.start - tile.start, segment.start - tile.start + segment.numel)
            for segment in tile.segments
            if self._is_stepped(segment.piece)
        ]
        if len(stepped) == len(tile.segments):  # with what lies between them, at once
            stepped = [range(tile.numel)]
        self._before_change(tile)
        self._visits.run(tile, stepped, self._run_on_device)
        self._finished(tile)

    def _run_on_device(self, tile: OnDevice) -> None:
        device_kernels.step_segments(self._segments(tile), self._grad_scale)

    def _segments(self, tile: OnDevice) -> list[device_kernels.Segment]:
        group = tile.tile.group
        return tile.segments(self._layout.for_group(group), self._rule_of, self._gradients.dtype_of(group))


def _numbers(options: Options) -> Options:
    """``options`` with numbers in place of tensors of one element."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def _torchs(method: str) -> Any:
    """A method of torch's optimizers, without what torch wraps around it: that loads its compiler, for a second."""
    return inspect.unwrap(getattr(torch.optim.Optimizer, method))
