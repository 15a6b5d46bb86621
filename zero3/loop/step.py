"""The update of the parameters: the norm, clipping, and the step, after the backward or during it.

A step whose gradients are not finite is skipped and changes no state. With step_in_backward each group is stepped as
soon as its gradients are final, before the norm is known: gradients cannot be clipped, and one that is not finite ends
the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_cpu.kernels import ExactSum
from tiering import _logs
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError, RankOrderError
from zero3.device.timeline import Timeline
from zero3.loop import hyperparameters
from zero3.loop.deferred_step import DeferredStep
from zero3.loop.step_state import Accumulation, CurrentStep, StepState
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.param_group import ParamGroup
from zero3.params.precision import LossScale
from zero3.params.replicas import Replicas
from zero3.passes.gradients import GradientStore
from zero3.passes.pass_state import in_autograd
from zero3.passes.prefetch import Prefetcher
from zero3.passes.reduction import GradientReducer
from zero3.ranks.collectives import Collectives
from zero3.state.parameters import Parameters

log = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class _RankFigures(NamedTuple):
    """The figures of one rank that a step exchanges: a row of float64, with the limbs of ``squares`` at its end.

    ``bad`` is the index of a parameter whose gradient is not finite, or -1. ``options`` is a digest of the
    hyperparameters that the step uses.
    """

    bad: float
    loss: float
    stop: float
    steps: float
    saving: float
    options: float
    squares: ExactSum

    def row(self) -> Tensor:
        """The figures as they are sent."""
        return torch.tensor([*self[:-1], *self.squares.limbs()], dtype=torch.float64, device="cpu")

    @classmethod
    def of_row(cls, row: Sequence[float]) -> _RankFigures:
        """The inverse of ``row``."""
        bad, loss, stop, steps, saving, options, *limbs = row
        return cls(bad, loss, stop, steps, saving, options, ExactSum.of_limbs(limbs))


@dataclass(frozen=True)
class _Sums:
    """The figures of all ranks: the norm of the gradients, and ``bad``, the first parameter that is not finite, or "".

    ``loss`` is the mean loss, ``stop`` the number of a stop signal that a rank has received, ``saving`` the progress of
    the slowest rank with a save.
    """

    norm: float
    bad: str
    loss: float | None
    stop: int
    saving: int


class Update:
    """Updates the parameters of ``groups``.

    ``norm`` is the norm of the last gradients, unscaled, also if their update was skipped. ``steps``, ``samples`` and
    ``skipped`` count over the whole run; ``samples`` are those of all ranks. Of the last update: ``overflow`` is True
    if it was skipped, ``loss`` is the mean over the ranks, ``stop`` the number of a stop signal, and ``saving`` the
    progress of the slowest rank with a save. ``applied`` is True if the last ``engine.step()`` has updated the
    parameters.
    """

    # Eight parameters: an update uses so many parts of a rank, and no two of them are one noun.
    def __init__(
        self,
        config: TieringConfig,
        *,
        groups: list[ParamGroup],
        gradients: GradientStore,
        sink: GradientStore | GradientReducer,
        optimizer: TieredOptimizer | ClientOptimizer,
        collectives: Collectives | None,
        replicas: Replicas | None,
        timeline: Timeline,
    ) -> None:
        self.current_step = CurrentStep()
        self.steps_in_backward = config.tiering.step_in_backward
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
        if config.tiering.step == "deferred" and self._stepper is not None:
            # Others can be read without a call that the engine sees.
            whole = () if replicas is None else replicas.groups
            later = frozenset(g for g in groups if g.moves and not g.slices and g not in whole)
            if not later:
                log.warning(
                    "tiering.step 'deferred' has no effect: all parameters stay on the device, or whole on every rank,"
                    " and step() updates them. Set it to 'after', or offload parameters (on a CPU, to NVMe)"
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
        if reason and not (loads and state is StepState.LOADING):
            raise EngineStateError(
                f"{call} was called on parameters that are partly updated ({reason}); close the engine, and"
                " initialize the model again from a checkpoint"
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
        """Whether a part of the last step is not applied yet."""
        return self.deferred is not None and self.deferred.under_way

    def finish_deferred(self) -> None:
        """Apply the last step to all parameters, if it was deferred."""
        if self.deferred is not None:
            self.deferred.finish()

    def waiting_norm(self) -> float:
        """The norm of the accumulated gradients, unscaled. All ranks call this together."""
        return self._sum_up("exchange the norm", None, stop=0, saving=0).norm / self.loss_scale.value

    def clip_next(self, max_norm: float) -> float:
        """Clip the next update to ``max_norm``, too; returns ``waiting_norm``. All ranks call this together."""
        if not max_norm > 0:
            raise ConfigError(f"clip_grad_norm_ got max_norm {max_norm!r}; it must be greater than 0")
        if self.steps_in_backward:
            raise ConfigError(
                "clip_grad_norm_ was called with tiering.step_in_backward, which updates parameters before the norm is"
                " known; set step_in_backward to false, or do not clip"
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
        self.finish_deferred()
        # Before the first gradient: the store squares the gradients of the last micro-batch as they arrive.
        self._gradients.last_micro_batch = last
        if last and not self.steps_in_backward and self._stepper is not None:
            self._stepper.expect_all()

    @property
    def is_last_backward(self) -> bool:
        """Whether the backward that runs, or has run last, is the last one before an update."""
        return self._gradients.last_micro_batch

    def begin_in_backward(self) -> None:
        """The first gradient of a backward that updates the parameters has arrived."""
        # Before the state changes: a bad option raises here, and nothing is updated.
        self._tiered_optimizer().begin_in_backward(1.0 / self.loss_scale.value)
        self.current_step.to_updating_in_backward()

    def group_done(self, group: ParamGroup, *, final: bool) -> None:
        """The backward of ``group`` has ended; ``final`` gradients are used now."""
        if self.current_step.state is not StepState.UPDATING_IN_BACKWARD:
            if self._stepper is not None:
                # A staging slot may have become free since the last group.
                self._stepper.read_ahead()
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
        # First: in every state below, no gradient of the backward is left.
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
        self._sink.reset()
        self.current_step.to_idle()
        _count_as_edits(self._groups)

    def run(self, loss: Tensor | None, samples: int, *, stop: int, saving: int) -> None:
        """Update the parameters with the gradients, and drop them; ``applied`` is False if the update was skipped.

        ``loss`` is this rank's, ``samples`` are those of all ranks, ``stop`` is the number of the stop signal that this
        rank has received, or 0, and ``saving`` its progress with a checkpoint (Checkpoints.progress).
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
            if self.current_step.state is StepState.UPDATED_IN_BACKWARD:
                self.current_step.to_idle()
                self._check_used(finite, sums.bad)
            elif finite:
                self._apply(self.norm, scale)
            else:
                self.skipped += 1
            self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
            # After the gradients were unscaled with the old value.
            self.loss_scale.update(not finite)
            if not finite:
                self._log_skipped(scale, sums.bad)
            self.steps += 1
            self.samples += samples
            self._check_skipped(sums.bad)
            self.applied = finite
        finally:
            self._clip_next = 0.0
            if not self.deferring:
                self._sink.reset()
            self.current_step.end_micro_batch()

    def _sum_up(self, purpose: str, loss: float | None, *, stop: int, saving: int) -> _Sums:
        """The figures of all ranks, from one exchange."""
        squares = self._gradients.sum_of_squares()
        bad = None if squares.is_finite else self._gradients.first_not_finite()
        if self._collectives is None:
            return _Sums(math.sqrt(float(squares)), bad.name if bad is not None else "", loss, stop, saving)
        index, loss_figure = -1 if bad is None else bad.index, math.nan if loss is None else loss
        options = hyperparameters.described(self._optimizer.param_groups, self._optimizer.defaults)
        local = _RankFigures(
            index, loss_figure, stop, self.steps, saving, hyperparameters.digest(options), squares
        )
        rows = self._collectives.table(local.row(), purpose)
        figures = [_RankFigures.of_row(row) for row in rows.tolist()]
        for rank, rank_figures in enumerate(figures):
            if rank_figures.steps != self.steps:
                raise RankOrderError(
                    f"rank {self._collectives.world.rank} is in step {self.steps + 1}, rank {rank} in step"
                    f" {rank_figures.steps + 1:.0f}: call step() equally often on all ranks"
                )
        if any(each.options != local.options for each in figures):
            # All ranks have the same rows, so either all or none reach this collective.
            of_all = self._collectives.gather_objects(options, "exchange the hyperparameters")
            hyperparameters.check_same(of_all, self.steps + 1)
        self._collectives.finish_step()
        first = min((each.bad for each in figures if each.bad >= 0), default=-1)
        average = None if loss is None else sum(each.loss for each in figures) / len(figures)
        stop_signal = next((int(each.stop) for each in figures if each.stop), 0)
        return _Sums(
            math.sqrt(float(ExactSum.total(each.squares for each in figures))),
            self._names.get(int(first), ""),
            average,
            stop_signal,
            int(min(each.saving for each in figures)),
        )

    def _apply(self, norm: float, scale: float) -> None:
        # Before the state changes: after an error here, nothing is updated yet.
        self._optimizer.prepare()
        try:
            clip = min((limit for limit in (self._clip, self._clip_next) if limit), default=0.0)
            factor = min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
            # From here on, an exception leaves parameters of two steps.
            self.current_step.to_updating()
            with self.current_step.tearing(self.steps + 1), self._timeline.span("compute", "update"):
                if self._replicas is not None:
                    self._replicas.begin()
                if self.deferred is not None:
                    later = self.deferred.groups
                    self._tiered_optimizer().step(grad_scale=factor / scale, later=later)
                    self.deferred.begin(self.steps + 1)
                else:
                    self._optimizer.step(grad_scale=factor / scale)
                if self._replicas is not None:
                    # After the last tile: other ranks wait for the gathers of groups in which this rank had nothing to
                    # update, too.
                    self._replicas.finish()
            self.current_step.to_idle()
        finally:
            _count_as_edits(self._groups)

    def _check_used(self, finite: bool, bad: str) -> None:
        """EngineStateError, which ends the run, if gradients that backward has used were not ``finite``."""
        if finite:
            return
        self.current_step.to_torn(f"the gradient of {bad!r} was not finite in step {self.steps + 1}")
        raise EngineStateError(
            f"the gradient of {bad!r} is not finite, and tiering.step_in_backward has already used it: parameters and"
            " optimizer state are invalid. Close the engine and resume from a checkpoint; set step_in_backward to"
            " false to skip such a step"
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
                *(self.steps + 1, bad, scale, self.loss_scale.value),
            )
        else:
            log.log(
                _logs.once(logging.WARNING),
                "step %d skipped: the gradient of %r is not finite; parameters and optimizer state are unchanged",
                *(self.steps + 1, bad),
            )


def _count_as_edits(groups: Iterable[ParamGroup]) -> None:
    """Increment versions as in-place updates do, so that autograd refuses a graph of the old values."""
    for group in groups:
        pairs = zip(group.layout.pieces, group.params, strict=True)
        torch.autograd.graph.increment_version([param for piece, param in pairs if piece.trainable])
        # After the increment, which is no edit of the user's.
        group.note_versions()


class BackwardEvents:
    """Receives the events of a backward (receivers.PassListener): their effect on the update of the parameters."""

    def __init__(
        self, accumulation: Accumulation, updates: Update, parameters: Parameters, prefetcher: Prefetcher
    ) -> None:
        self._accumulation = accumulation
        self._updates = updates
        self._parameters = parameters
        self._prefetcher = prefetcher

    def on_backward(self) -> None:
        self._updates.expect(last=self._accumulation.syncing and self._accumulation.at_boundary)

    def on_first_gradient(self) -> bool:
        steps, scale = self._accumulation.steps, self._updates.loss_scale.value
        if (steps > 1 or scale != 1.0) and not self._accumulation.scaled:
            raise EngineStateError(
                "loss.backward() does not "
                + " and does not ".join(
                    [f"divide by gradient_accumulation_steps ({steps})"] * (steps > 1)
                    + [f"multiply by the loss scale ({scale:g})"] * (scale != 1.0)
                )
                + "; call engine.backward(loss), or engine.scale(loss).backward(); in a loop of accelerate,"
                " accelerator.backward(loss)"
            )
        if not self._updates.steps_in_backward:
            return False
        self._updates.check_usable("backward")
        self._updates.current_step.check_one_backward()
        if self._updates.is_last_backward:
            self._parameters.check_before_update()
            self._parameters.store_edits_of_residents()
            self._updates.begin_in_backward()
        return self._updates.is_last_backward

    def on_group_done(self, group: ParamGroup, final: bool) -> None:
        if final:
            self._prefetcher.drop(group)
        self._updates.group_done(group, final=final)

    def on_end_of_backward(self) -> None:
        self._accumulation.note_backward()
        if self._updates.current_step.state is StepState.UPDATING_IN_BACKWARD:
            # Prefetched values are old for groups that are stepped only now.
            self._prefetcher.forget()
        self._updates.end_of_backward()
