"""TieredOptimizer: an update rule over tiled state, wherever a tile's bytes live.

The optimizer derives the rule of each parameter from the options of its param group; tile_stepper.py steps the tiles.
Usually all tiles are due in ``step``, after the norm of all gradients is known. With step_in_backward a group's tiles
are due when its gradients are final, and tiles that have arrived are stepped then; backward waits for no tile, unless
it needs the room.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
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

    ``step`` needs the ``gradients`` of a finished backward; the engine calls it. ``stepper`` steps the tiles, and reads
    them ahead.

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
        self._rules: dict[tuple[int, int], kernels.Rule] = {}  # by param group and step
        self._number_of: dict[int, int] = {}  # of the param group, by piece index
        # With step_in_backward, each in order: the groups whose tiles were due in this backward, those whose gradients
        # are still being copied, and the order of the backward before.
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
        self._fix_options()
        for number, options in enumerate(self._options):
            self._rule_at(number, options, 1)
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

    @property
    def deferring(self) -> bool:
        """Whether a part of the last step is not applied yet."""
        return self._updates.deferring

    def release_read_ahead(self) -> None:
        """Free the slots of the tiles that were read ahead, for other users; the step reads them again.

        The tiers have the state of one step afterwards.
        """
        self._updates.finish_deferred()
        self.stepper.release_read_ahead()

    def settle(self) -> None:
        """Wait until host memory holds the updates of the GPU, and the CPU may read and change it."""
        self.stepper.settle()

    def prepare(self) -> None:
        """Count the next step and derive its rules. A bad option raises before any change."""
        self._fix_options()
        self._count(piece for group in self.stepper.groups for piece in group.layout.pieces)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float | None = None,
        later: Collection[ParamGroup] = (),
    ) -> None:
        """Update every parameter that got a gradient, gradients multiplied by ``grad_scale`` (unscale x clip).

        Groups in ``later`` are only queued: the stepper updates each before its next use. Only the engine calls this,
        after ``prepare``: it also clips, counts, and drops fetched groups. Scripts call ``engine.step()``.
        """
        if closure is not None or grad_scale is None:
            raise EngineStateError(self._refusal_to_step())
        # The device may still fetch parameters for its backward.
        self.stepper.wait_for_copies()
        with kernels.step_under_way():
            self.stepper.begin(grad_scale, in_backward=False)
            for group in self.stepper.groups:
                self.stepper.add_due(group)
            if later:
                self.stepper.begin_deferred()
                for group in self.stepper.groups:
                    if group not in later:
                        self.stepper.step_group(group, wait=True)
            else:
                self.stepper.finish()
        self._mark_step_called()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients. Without effect after the engine is closed."""
        # The gradients of a deferred step are used, though some are still there.
        if self._ready.closed or self.deferring:
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
        self.stepper.add_rules(rule_of)

    def _make_due(self, group: ParamGroup) -> None:
        """The gradients of ``group`` are final, in backward."""
        self._backward_order[group] = None
        self._final_groups.pop(group, None)
        # Before the count: from here on a late gradient is refused, because the update would not contain it.
        self._gradients.complete(group)
        self._count(group.layout.pieces)
        self.stepper.add_due(group)


def _scalar_options(options: Options) -> Options:
    """``options`` with numbers in place of tensors of one element."""
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in options.items()
    }


def _unwrapped(method: str) -> Any:
    """A method of torch's optimizers without torch's wrapper, which would import the compiler (one second)."""
    return inspect.unwrap(getattr(torch.optim.Optimizer, method))
