"""TieredOptimizer: an update rule over tiled state, wherever a tile's bytes live.

The optimizer derives the rule of each parameter from the options of its param group; tile_stepper.py steps the tiles.
Usually all tiles are due in ``step``, after the norm of all gradients is known. With step 'in_backward' a group's tiles
are due when its gradients are final, and tiles that have arrived are stepped then; backward waits for no tile, unless
it needs the room.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.rules import ADAM, UpdateRule
from tiering.errors import EngineStateError
from zero3.optimizer import update_rules
from zero3.optimizer.deepspeed_names import DeepSpeedOptimizerNames
from zero3.optimizer.tile_stepper import TileStepper
from zero3.optimizer.tiles import StepListener
from zero3.optimizer.update_rules import OptimizerOptions, Options, planned_group
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import GradientStore

ON_TIERS = "tiers"  # the key of a state_dict that identifies its state


class TieredOptimizer(DeepSpeedOptimizerNames, torch.optim.Optimizer):
    """An update rule over tiered state; a true ``torch.optim.Optimizer``, so schedulers and loops can drive it.

    An update uses the ``gradients`` of a finished backward: ``prepare`` it, ``begin`` it, and let the ``stepper`` step
    the tiles, which it also reads ahead.

    ``state_names`` names the moments that every trained parameter has, in the order in which tiles hold them.
    ``steps`` counts the updates that used them, by parameter (``Piece.index``).
    """

    def __init__(
        self,
        rule: UpdateRule,
        options: OptimizerOptions,
        stepper: TileStepper,
        gradients: GradientStore,
    ) -> None:
        super().__init__(options.param_groups, options.defaults)
        if options.source is not None:
            self.param_groups = options.source.param_groups
        self.rule = rule
        self.state_names = update_rules.state_names(rule, self.param_groups)
        self.steps: dict[int, int] = {}
        self._source = options.source
        self._gradients = gradients
        self.stepper = stepper
        self._index_of = {
            param: piece.index
            for group in stepper.groups
            for piece, param in zip(group.layout.pieces, group.params, strict=True)
            if piece.trainable
        }
        # Of the step that is under way:
        self._options: list[Options] = []
        self._steps_before: dict[int, int] = {}  # ``steps`` before a step ahead
        self._rules: dict[tuple[int, int], kernels.Rule] = {}  # by param group and step
        self._number_of: dict[int, int] = {}  # of the param group, by piece index
        self._prepared: dict[int, tuple[int, kernels.Rule]] = {}  # see _rules_of
        # In backward, each in order: the groups whose tiles were due in this one, those whose gradients are still being
        # copied, and the order of the backward before.
        self._backward_order: dict[ParamGroup, None] = {}
        self._final_groups: dict[ParamGroup, None] = {}
        self._usual_order: list[ParamGroup] = list(reversed(stepper.groups))

    @property
    def trains(self) -> bool:
        """Whether the model has parameters to update."""
        return self.rule is not update_rules.NONE

    @property
    def rule_name(self) -> str:
        """The name of the update rule in messages and checkpoints."""
        if self.rule is ADAM and self.param_groups[0]["decoupled_weight_decay"]:
            return "AdamW"
        return self.rule.name

    def listen(self, listener: StepListener) -> None:
        """Call ``listener`` from now on before a tile is stepped. There is one listener."""
        self.stepper.listen(listener)

    def begin_in_backward(self, grad_scale: float) -> None:
        """A backward begins that steps each group as soon as its gradients are final, with the current options.

        A bad option raises before any change.
        """
        self._fix_checked_options()
        self._backward_order.clear()
        self._final_groups.clear()
        self.stepper.begin(grad_scale, in_backward=True)
        self.stepper.expect(self._usual_order)

    def group_done(self, group: ParamGroup, *, final: bool) -> None:
        """A backward that steps has left ``group``; ``final``: the group gets no more gradients.

        Gradients that are still being copied from a GPU are waited for when backward has ended: until then the CPU
        has to queue more work for the GPU.
        """
        if final and self.stepper.has_tiles(group):
            self._final_groups[group] = None
        # The CPU updates with gradients in host memory: only groups whose copies have arrived are due.
        for each in [each for each in self._final_groups if self._gradients.has_arrived(each)]:
            self._make_due(each)
        self.stepper.advance()

    def finish_in_backward(self) -> None:
        """The backward has ended: step the remaining groups."""
        # Kernels of this backward are queued and may not have run: the device may still fetch parameters of the
        # remaining groups.
        self.stepper.wait_for_copies()
        for group in (*self._final_groups, *self._usual_order):
            if group not in self._backward_order:
                self._make_due(group)
                self.stepper.advance()
        self.stepper.finish()
        self._usual_order = list(self._backward_order)
        self._mark_step_called()

    def prepare_ahead(self) -> None:
        """Fix the options of a step that begins in backward. A bad option raises here."""
        self._fix_checked_options()
        self.stepper.keep()

    def begin_ahead(self, grad_scale: float, groups: Collection[ParamGroup]) -> None:
        """The prepared step begins, and may be taken back. The caller's block is atomic, and moves no bytes.

        ``groups`` are those that ``step_ahead`` may step.
        """
        self._steps_before = self.steps.copy()
        self._backward_order.clear()
        self.stepper.begin_ahead(grad_scale, [group for group in self._usual_order if group in groups])

    def step_ahead(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final: what can be stepped ahead of it is due."""
        self._backward_order[group] = None
        self._count(self._rules_of(self._gradients.use_ahead(group)))
        self.stepper.add_due(group)

    def was_stepped_ahead(self, group: ParamGroup) -> bool:
        """Whether ``step_ahead`` was called for ``group``."""
        return group in self._backward_order

    def may_adopt(self) -> bool:
        """Whether the gradients and the options are still those of the step ahead."""
        return self._gradients.used_rightly() and self._has_options_of_step()

    def prepare_rest(self) -> None:
        """Derive the rules of what the step ahead has not stepped."""
        self._prepared = self._rules_of(
            self._received(group for group in self.stepper.groups if group not in self._backward_order)
        )
        # The device may still fetch parameters for its backward.
        self.stepper.wait_for_copies()

    def adopt(self) -> None:
        """What was stepped ahead stays; count and queue the rest, which is prepared. The caller's block is atomic."""
        self._gradients.forget_use()
        self._usual_order.sort(key=[*self._backward_order, *self._usual_order].index)
        self.stepper.adopt()
        self._queue()

    def take_back(self) -> None:
        """Undo what was stepped ahead. The caller's block is atomic."""
        self._gradients.forget_use()
        self._backward_order.clear()
        self.steps = self._steps_before
        self.stepper.take_back()

    @property
    def deferring(self) -> bool:
        """Whether a part of the last step is not applied yet."""
        return self._updates.deferring

    def release_read_ahead(self) -> None:
        """Free the slots of the tiles that were read ahead, for other users; the step reads them again.

        The tiers have the state of one step afterwards.
        """
        self._updates.settle_step()
        self.stepper.release_read_ahead()

    def settle(self) -> None:
        """Wait until host memory holds the updates of the GPU, and the CPU may read and change it."""
        self.stepper.settle()

    def prepare(self) -> None:
        """Derive the rules of the next step. It can still be dropped: a bad option raises here."""
        self._fix_options()
        self._prepared = self._rules_of(self._received(self.stepper.groups))
        if self.stepper.overwritten.tiles:
            self.stepper.overwritten.restore_rest(self._prepared)
        self.stepper.keep()
        # The device may still fetch parameters for its backward.
        self.stepper.wait_for_copies()

    def begin(self, grad_scale: float) -> None:
        """Count the prepared step, and queue the tiles of all parameters that got a gradient.

        Gradients are multiplied by ``grad_scale`` (unscale x clip). The caller's block is atomic, and moves no bytes.
        """
        self.stepper.begin(grad_scale, in_backward=False)
        self._queue()

    def _queue(self) -> None:
        self._count(self._prepared)
        for group in self.stepper.groups:
            self.stepper.add_due(group)
        self._mark_step_called()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Raises EngineStateError: scripts call ``engine.step()``, which also clips, and drops fetched groups."""
        raise EngineStateError(self._refusal_to_step())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients. Without effect after the engine is closed."""
        # The gradients of a deferred step are used, though some are still there.
        if self._ready.closed or self.deferring:
            return
        self.warn_of_dropped_gradients("zero_grad()")
        # First: a step that was begun with these gradients is taken back.
        self._updates.settle_step()
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
        self.stepper.forget_rules()

    def _fix_checked_options(self) -> None:
        """Fix the options before it is known which parameters get a gradient: each bad one raises here."""
        self._fix_options()
        for number, options in enumerate(self._options):
            self._rule_at(number, options, 1)

    def _has_options_of_step(self) -> bool:
        """Whether the options are those that were fixed for the step: the same numbers for the same parameters."""
        current = [_scalar_options(group) for group in self.param_groups]
        return len(current) == len(self._options) and all(
            now.keys() == then.keys() and all(_are_same(now[key], then[key]) for key in now)
            for now, then in zip(current, self._options, strict=True)
        )

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

    def _received(self, groups: Iterable[ParamGroup]) -> Iterator[Piece]:
        """The pieces of ``groups`` that got a gradient."""
        return (piece for group in groups for piece in group.layout.pieces if self._gradients.received(piece))

    def _rules_of(self, pieces: Iterable[Piece]) -> dict[int, tuple[int, kernels.Rule]]:
        """The next steps of ``pieces``, which got a gradient, and their rules, by ``Piece.index``."""
        result = {}
        for piece in pieces:
            if piece.index not in self._number_of:
                continue
            number = self._number_of[piece.index]
            step = self.steps.get(piece.index, 0) + 1
            if (number, step) not in self._rules:
                self._rules[number, step] = self._rule_at(number, self._options[number], step)
            result[piece.index] = step, self._rules[number, step]
        return result

    def _count(self, rules_of: Mapping[int, tuple[int, kernels.Rule]]) -> None:
        """Count the steps of ``_rules_of``, which the stepper makes from now on."""
        with_state = [bool(self.rule.state_names(options)) for options in self._options]
        self.steps.update(
            {index: step for index, (step, _) in rules_of.items() if with_state[self._number_of[index]]}
        )
        self.stepper.add_rules({index: rule for index, (_, rule) in rules_of.items()})

    def _make_due(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final, in backward."""
        self._backward_order[group] = None
        self._final_groups.pop(group, None)
        # Before the count: from here on a late gradient is refused, because the update would not contain it.
        self._gradients.complete(group)
        self._count(self._rules_of(self._received([group])))
        self.stepper.add_due(group)


def _scalar_options(options: Options) -> Options:
    """A copy of ``options``, its lists too, with numbers in place of tensors of one element."""
    return {name: _scalar(value) for name, value in options.items()}


def _scalar(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    # Of ``params``, which may be changed in place.
    return value.copy() if isinstance(value, list) else value


def _are_same(now: Any, then: Any) -> bool:
    """Whether an option has its value still; ``params`` are lists of tensors."""
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(map(_are_same, now, then))
    return now is then or (not isinstance(now, Tensor) and now == then)


def _unwrapped(method: str) -> Any:
    """A method of torch's optimizers without torch's wrapper, which would import the compiler (one second)."""
    return inspect.unwrap(getattr(torch.optim.Optimizer, method))
