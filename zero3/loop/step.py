"""The update of the parameters: the norm, clipping, and the step, after the backward or during it.

A step whose gradients are not finite is skipped and changes no state. With step 'in_backward' each group is stepped as
soon as its gradients are final, before the norm is known: gradients cannot be clipped, and one that is not finite ends
the run.

Note [A step is whole]
    Until a step has begun, an exception leaves the parameters, the state and the counters of the step before, and drops
    the gradients. Its beginning is one atomic block, which counts the step and queues its tiles. From then on an
    exception interrupts the step, which whoever needs the parameters next completes (deferred_step.py): nobody sees a
    mix of two steps. Three steps cannot be continued, and end the training: one of a torch optimizer, one that backward
    makes, and one of several ranks, which does not end on all of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiering import _logs
from tiering._interrupts import atomic
from tiering.config.training import StepPolicy, TieringConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.device.timeline import Timeline
from zero3.loop import hyperparameters
from zero3.loop.deferred_step import DeferredStep
from zero3.loop.rank_figures import RankFigures, StepFigures, exchange
from zero3.loop.step_ahead import StepAhead
from zero3.loop.step_state import NOT_RESUMED, Accumulation, CurrentStep, StepState
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.param_group import ParamGroup
from zero3.params.precision import LossScale
from zero3.params.replicas import Replicas
from zero3.passes.gradients import GradientStore
from zero3.passes.pass_state import in_autograd
from zero3.passes.reduction import GradientReducer
from zero3.ranks.collectives import Collectives

log = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Update:
    """Updates the parameters of ``groups``.

    ``norm`` is the norm of the last gradients, unscaled, also if their update was skipped. ``steps``, ``samples`` and
    ``skipped`` count over the whole run; ``samples`` are those of all ranks. Of the last update: ``overflow`` is True
    if it was skipped, ``loss`` is the mean over the ranks, ``stop`` the number of a stop signal, and ``saving`` the
    progress of the slowest rank with a save. ``applied`` is True if the last ``engine.step()`` has updated the
    parameters.
    """

    # Nine parameters: an update uses so many parts of a rank, and no two of them are one noun.
    def __init__(
        self,
        config: TieringConfig,
        *,
        step: StepPolicy,
        groups: list[ParamGroup],
        gradients: GradientStore,
        sink: GradientStore | GradientReducer,
        optimizer: TieredOptimizer | ClientOptimizer,
        collectives: Collectives | None,
        replicas: Replicas | None,
        timeline: Timeline,
    ) -> None:
        self.current_step = CurrentStep()
        exact = config.tiering.swap_versions > 1
        self.steps_in_backward = step is StepPolicy.IN_BACKWARD and not exact
        self.loss_scale = LossScale.from_config(config)
        self.norm: float | None = None
        self.steps = 0
        self.samples = 0
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.overflow = False
        self.applied = False
        self.loss: float | None = None
        self.stop = 0
        self.saving = 0
        self._max_skipped = config.tiering.max_skipped_steps
        self._scales = "fp16" in (config.precision, config.autocast)
        self._clip = config.gradient_clipping
        # As _clip, of the next update alone; 0 is no clipping.
        self._clip_next = 0.0
        self._groups = groups
        self._gradients = gradients
        self._sink = sink
        self._optimizer = optimizer
        self._stepper = optimizer.stepper
        self._collectives = collectives
        self._replicas = replicas
        self._timeline = timeline
        self._names = {piece.index: piece.name for group in groups for piece in group.layout.pieces}
        self.deferred: DeferredStep | None = None
        self.ahead: StepAhead | None = None
        # Others can be read without a call that the engine sees.
        whole = () if replicas is None else replicas.groups
        read_by_calls = frozenset(g for g in groups if g.moves and not g.slices and g not in whole)
        if step is StepPolicy.IN_BACKWARD and exact and isinstance(optimizer, TieredOptimizer):
            if ahead := read_by_calls & optimizer.stepper.can_step_ahead:
                self.ahead = StepAhead(optimizer, gradients, ahead)
            else:
                log.warning(
                    "tiering.step 'in_backward' has no effect: no group has its optimizer state in swap space, where a"
                    " step can be taken back, and parameters that can be, too. Set it to 'after', or offload both to"
                    " NVMe"
                )
        if self._stepper is not None:
            later = read_by_calls if step is StepPolicy.DEFERRED else frozenset[ParamGroup]()
            if step is StepPolicy.DEFERRED and not later:
                log.warning(
                    "tiering.step 'deferred' has no effect: all parameters stay on the device, or whole on every rank,"
                    " and step() updates them. Set it to 'after', or offload parameters"
                )
            self.deferred = DeferredStep(self._stepper, later, sink, self.current_step, timeline)

    @property
    def scale(self) -> float | None:
        """The loss scale; None if the loss is not scaled."""
        return self.loss_scale.value if self._scales else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the optimizer, with their options."""
        return self._optimizer.param_groups

    @property
    def broken(self) -> str:
        """The reason why training cannot continue, as far as this rank knows, or "". Any thread may read it."""
        failure = None if self._collectives is None else self._collectives.failure
        return self.current_step.broken or str(failure or "")

    def check_usable(self, call: str, *, loads: bool = False) -> None:
        """EngineStateError unless the parameters are of one step on all ranks, or ``call`` loads another step."""
        if self._collectives is not None:
            self._collectives.check()
        state, reason = self.current_step.state, self.current_step.reason
        if state is StepState.OUT_OF_STEP:
            raise EngineStateError(
                f"{call} was called after {reason}, and the ranks can no longer continue together; close"
                " the engine, and initialize the model again from a checkpoint"
            )
        if state is StepState.UPDATING_IN_BACKWARD and not in_autograd():
            # An exception has ended the user's own loss.backward().
            reason = f"the backward of step {self.steps + 1} has not ended"
        if not loads:
            self._check_resumed(call)
        if reason and not (loads and state is StepState.LOADING):
            raise EngineStateError(
                f"{call} was called on parameters that are partly updated ({reason}); close the engine, and"
                " initialize the model again from a checkpoint"
            )

    def _check_resumed(self, call: str) -> None:
        if self.current_step.reason == NOT_RESUMED:
            raise EngineStateError(
                f"{call} was called on parameters without values: {NOT_RESUMED}; call load_checkpoint first"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state that the next update depends on, without the optimizer."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "skipped": self.skipped,
            "loss_scale": self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``."""
        self.steps, self.samples = state_dict["steps"], state_dict["samples"]
        self.skipped, self.skipped_in_a_row = state_dict["skipped"], 0
        self.loss_scale.load_state_dict(state_dict["loss_scale"])

    @property
    def deferring(self) -> bool:
        """Whether a part of the last step is not applied yet: the gradients are its."""
        return self.deferred is not None and self.deferred.under_way

    def settle_step(self, *, loads: bool = False) -> None:
        """Leave no step under way: complete one that was deferred or interrupted, and take back one begun ahead.

        The caller reads parameters or state next, unless it ``loads`` others.
        """
        if not loads:
            self._check_resumed("a read")
        if self.deferred is not None and self.deferred.under_way:
            self.deferred.finish()
        self.take_back()
        if self.ahead is not None and not loads:
            self.ahead.restore()

    def take_back(self) -> None:
        """Undo what was stepped ahead of ``step()``, except for what is restored before it is read."""
        if self.ahead is not None:
            self.ahead.take_back()

    def start_interrupted(self) -> None:
        """A pass begins: go on with a step that was interrupted, as far as parameters can be read without a call."""
        if self.deferred is not None and self.deferred.under_way:
            self.deferred.start()

    def before_read(self, group: ParamGroup, *, wait: bool) -> bool:
        """``group`` is about to be read at home: give it the values of the last step (prefetch.Update)."""
        self._check_resumed(f"a read of {group.name!r}")
        if self.ahead is not None:
            self.ahead.before_read(group)
        if self.deferred is not None and self.deferred.under_way:
            return self.deferred.apply(group, wait=wait)
        return self.ahead is None or self.ahead.restore(group, wait=wait)

    def waiting_norm(self) -> float:
        """The norm of the accumulated gradients, unscaled. All ranks call this together."""
        return self._sum_up("exchange the norm", None, stop=0, saving=0).norm / self.loss_scale.value

    def clip_next(self, max_norm: float) -> float:
        """Clip the next update to ``max_norm``, too; returns ``waiting_norm``. All ranks call this together."""
        if not max_norm > 0:
            raise ConfigError(f"clip_grad_norm_ got max_norm {max_norm!r}; it must be greater than 0")
        if self.steps_in_backward:
            raise ConfigError(
                "clip_grad_norm_ was called with tiering.step 'in_backward', which updates parameters before the norm"
                " is known; set step to 'deferred' or 'after', or do not clip"
            )
        if not self.current_step.pending:
            raise EngineStateError(
                "clip_grad_norm_ was called without a backward since the last step; call it after the last backward"
            )
        norm = self.waiting_norm()
        self._clip_next = min(max_norm, self._clip_next or max_norm)
        return norm

    def expect(self, *, last: bool) -> None:
        """A backward begins; the ``last`` one before an update starts to read optimizer state."""
        # Its gradients replace those of the step before.
        self.settle_step()
        # Before the first gradient: the store squares the gradients of the last micro-batch as they arrive.
        self._gradients.last_micro_batch = last
        if last and not self.steps_in_backward and self._stepper is not None and not self.steps_ahead:
            self._stepper.expect_all()

    @property
    def steps_ahead(self) -> bool:
        """Whether the last backward before an update begins the step."""
        return self.ahead is not None and self.ahead.pays

    @property
    def is_last_backward(self) -> bool:
        """Whether the backward that runs, or has run last, is the last one before an update."""
        return self._gradients.last_micro_batch

    def begin_in_backward(self) -> None:
        """The first gradient of a backward that updates the parameters, or begins to, has arrived."""
        if self.ahead is not None:
            self.ahead.begin(1.0 / self.loss_scale.value)
            return
        # Before the state changes: a bad option raises here, and nothing is updated.
        self._tiered_optimizer().begin_in_backward(1.0 / self.loss_scale.value)
        self.current_step.to_updating_in_backward()

    def advance(self) -> None:
        """Go on with what can be done of the next step while backward runs."""
        if self.ahead is not None and self.ahead.under_way:
            self.ahead.advance()
        elif self._stepper is not None:
            # A staging slot may have become free.
            self._stepper.read_ahead()

    def group_done(self, group: ParamGroup, *, final: bool) -> None:
        """The backward of ``group`` has ended; ``final`` gradients are used now."""
        if self.current_step.state is not StepState.UPDATING_IN_BACKWARD:
            self.advance()
            return
        with self.current_step.tearing(self.steps + 1):
            self._tiered_optimizer().group_done(group, final=final)
        if final:
            _count_as_edits([group])

    def end_micro_batch(self) -> None:
        """``step()`` has ended a micro-batch that is not the last one before an update."""
        self.applied = False
        self.current_step.end_micro_batch()

    def end_of_backward(self) -> None:
        """The backward has ended: all its gradients have arrived."""
        if self.current_step.state is StepState.UPDATING_IN_BACKWARD:
            with self.current_step.tearing(self.steps + 1):
                self._tiered_optimizer().finish_in_backward()
            # After the last tile: until then, an exception leaves parameters of two steps.
            self.current_step.to_updated_in_backward()
            _count_as_edits(self._groups)
        else:
            self.current_step.to_pending()

    def give_up(self) -> None:
        """An exception in backward drops the gradients since the last update."""
        self.take_back()
        # First: in every state below, no gradient of the backward is left. If the last step is not complete, it is what
        # the backward has failed to complete before its first gradient.
        if not self.deferring:
            self._sink.reset()
        reason = f"the backward of step {self.steps + 1} was ended by an exception"
        if self._collectives is not None:
            self.current_step.to_out_of_step(f"{reason} on this rank")
        elif self.current_step.state is StepState.UPDATING_IN_BACKWARD:
            self.current_step.to_torn(reason)
        else:
            self.current_step.to_idle()

    def forget(self) -> None:
        """The parameters are about to be replaced: drop gradients, and invalidate graphs of the old values."""
        self.take_back()
        self._sink.reset()
        self.current_step.to_idle()
        _count_as_edits(self._groups)

    def run(
        self,
        loss: Tensor | None,
        samples: int,
        accumulation: Accumulation,
        *,
        stop: int,
        saving: int,
        schedule: Callable[[], None],
    ) -> None:
        """Update the parameters with the gradients, and drop them; ``applied`` is False if the update was skipped.

        ``loss`` is this rank's, ``samples`` are those of all ranks, ``stop`` is the number of the stop signal that this
        rank has received, or 0, and ``saving`` its progress with a checkpoint (Checkpoints.progress). With the update,
        its last micro-batch is counted in ``accumulation``, and ``schedule`` is called, which sets the learning rate of
        the next update. See Note [A step is whole].
        """
        self.applied = False
        try:
            scale = self.loss_scale.value
            with self._timeline.span("compute", "norm"):
                # The CPU waits here until the device has computed the loss.
                number = None if loss is None else float(loss)
                sums = self._sum_up("step", number, stop=stop, saving=saving)
            self.norm, self.loss = sums.norm / scale, sums.loss
            self.stop, self.saving = sums.stop, sums.saving
            finite = math.isfinite(self.norm)
            self.overflow = not finite
            count = partial(self._count, samples, accumulation, schedule)
            if self.current_step.state is StepState.UPDATED_IN_BACKWARD:
                self._check_used(finite, sums.bad)
                count()
            elif finite:
                self._apply(self.norm, scale, count)
            else:
                self._skip(samples, accumulation, scale, sums.bad)
        finally:
            self._clip_next = 0.0
            if not self.deferring:
                self._sink.reset()
            # Of an update that is not counted.
            accumulation.drop()
            self.current_step.end_micro_batch()

    def _sum_up(self, purpose: str, loss: float | None, *, stop: int, saving: int) -> StepFigures:
        """The figures of all ranks, from one exchange."""
        squares = self._gradients.sum_of_squares()
        bad = None if squares.is_finite else self._gradients.first_not_finite()
        local = RankFigures(
            bad=-1 if bad is None else bad.index,
            loss=math.nan if loss is None else loss,
            stop=stop,
            steps=self.steps,
            saving=saving,
            squares=squares,
        )
        figures, own = [local], None
        if self._collectives is not None:
            own = self._collectives.tables.ranks
            options = hyperparameters.described(self._optimizer.param_groups, self._optimizer.defaults)
            figures = exchange(local, options, self._collectives, purpose)
        return StepFigures.of_ranks(figures, self._names, has_loss=loss is not None, own=own)

    def _apply(self, norm: float, scale: float, count: Callable[[], None]) -> None:
        """Make the update, and ``count`` it. See Note [A step is whole]."""
        clip = min((limit for limit in (self._clip, self._clip_next) if limit), default=0.0)
        factor = min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
        if self.deferred is None:
            assert isinstance(self._optimizer, ClientOptimizer)
            with self.current_step.tearing(self.steps + 1), self._timeline.span("compute", "update"):
                try:
                    self._optimizer.step(grad_scale=factor / scale)
                finally:
                    _count_as_edits(self._groups)
            count()
            return
        optimizer = self._tiered_optimizer()
        adopted = self.ahead is not None and self.ahead.is_right(1.0 / scale, unclipped=factor == 1.0)
        optimizer.prepare_rest() if adopted else optimizer.prepare()
        with atomic():
            if adopted and self.ahead is not None:
                self.ahead.adopt()
            else:
                optimizer.begin(factor / scale)
            self.deferred.begin(self.steps + 1)
            _count_as_edits(self._groups)
            count()
        with nullcontext() if self._collectives is None else self.current_step.tearing(self.steps):
            if self._replicas is not None:
                self._replicas.begin()
            self.deferred.start()
            if self._replicas is not None:
                # After the last tile: other ranks wait for the gathers of groups in which this rank had nothing to
                # update, too.
                self._replicas.finish()

    def _count(self, samples: int, accumulation: Accumulation, schedule: Callable[[], None]) -> None:
        """Count an update that is made, or has begun."""
        accumulation.count(updated=True)
        self.skipped_in_a_row = 0
        self.loss_scale.update(False)
        self.steps += 1
        self.samples += samples
        self.applied = True
        self.current_step.to_idle()
        # Last, because this is the user's code, which may raise.
        schedule()

    def _skip(self, samples: int, accumulation: Accumulation, scale: float, bad: str) -> None:
        """Count a step whose gradients, at loss scale ``scale``, are not finite: that of ``bad`` and maybe others."""
        if self.ahead is not None:
            self.ahead.skip()
        with atomic():
            accumulation.count(updated=True)
            self.skipped += 1
            self.skipped_in_a_row += 1
            self.loss_scale.update(True)
            self.steps += 1
            self.samples += samples
        self._log_skipped(scale, bad)
        self._check_skipped(bad)

    def _check_used(self, finite: bool, bad: str) -> None:
        """EngineStateError, which ends the run, if gradients that backward has used were not ``finite``."""
        if finite:
            return
        self.current_step.to_torn(f"the gradient of {bad!r} was not finite in step {self.steps + 1}")
        raise EngineStateError(
            f"the gradient of {bad!r} is not finite, and tiering.step 'in_backward' has already used it: parameters and"
            " optimizer state are invalid. Close the engine and resume from a checkpoint; set step to 'deferred' or"
            " 'after' to skip such a step"
        )

    def _check_skipped(self, bad: str) -> None:
        """EngineStateError after as many skipped steps in a row as the configuration allows."""
        if self.loss_scale.dynamic or not 0 < self._max_skipped <= self.skipped_in_a_row:
            return
        raise EngineStateError(
            f"{self.skipped_in_a_row} steps in a row were skipped, up to step {self.steps}: the gradient of {bad!r} is"
            " not finite. Parameters and optimizer state are those of step"
            f" {self.steps - self.skipped_in_a_row}: look for the first batch whose loss is not finite, or resume from"
            " a checkpoint with a lower learning rate. tiering.max_skipped_steps"
            f" ({self._max_skipped}) is the limit of skipped steps in a row; 0 is no limit"
        )

    def _tiered_optimizer(self) -> TieredOptimizer:
        """The optimizer, which steps in backward; ``initialize`` refuses a client's optimizer for that."""
        assert isinstance(self._optimizer, TieredOptimizer)
        return self._optimizer

    def _log_skipped(self, scale: float, bad: str) -> None:
        if self.loss_scale.dynamic:
            log.log(
                _logs.once(logging.INFO),
                "step %d skipped: the gradient of %r is not finite at loss scale %g; it is %g now",
                *(self.steps, bad, scale, self.loss_scale.value),
            )
        else:
            log.log(
                _logs.once(logging.WARNING),
                "step %d skipped: the gradient of %r is not finite; parameters and optimizer state are unchanged",
                *(self.steps, bad),
            )


def _count_as_edits(groups: Iterable[ParamGroup]) -> None:
    """Increment versions as in-place updates do, so that autograd refuses a graph of the old values."""
    for group in groups:
        pairs = zip(group.layout.pieces, group.params, strict=True)
        torch.autograd.graph.increment_version([param for piece, param in pairs if piece.trainable])
        # After the increment, which is no edit of the user's.
        group.note_versions()
