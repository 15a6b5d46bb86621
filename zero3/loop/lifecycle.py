"""Readiness: the state of an engine between the calls of a training loop, and the calls that it allows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tiering._interrupts import uninterrupted
from tiering.errors import EngineStateError
from tiering.telemetry import Phase
from zero3.device import out_of_memory, storages
from zero3.device.tiers import Tiers
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation, StepState
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.passes.pass_state import PassState, in_autograd
from zero3.passes.schedule import PassSchedule
from zero3.ranks.collectives import Collectives
from zero3.state.parameters import Parameters

log = logging.getLogger(__name__)


class Readiness:
    """Checks whether a call is legal now. A failed check raises EngineStateError with the call and the remedy.

    ``ended_by`` is the call that has ended the engine, or "". ``in_forward`` is True while engine.forward runs.
    """

    def __init__(
        self,
        parameters: Parameters,
        tiers: Tiers,
        collectives: Collectives | None,
        optimizer: TieredOptimizer | ClientOptimizer,
        updates: Update,
        accumulation: Accumulation,
        schedule: PassSchedule,
    ) -> None:
        self.ended_by = ""
        self.in_forward = False
        self._parameters = parameters
        self._tiers = tiers
        self._collectives = collectives
        self._trains = optimizer.trains
        self._updates, self._step = updates, updates.current_step
        self._accumulation = accumulation
        self._schedule = schedule

    def end(self, call: str) -> None:
        """``call`` ends the engine."""
        self.ended_by = call

    @contextmanager
    def running_forward(self) -> Iterator[None]:
        """A block in which engine.forward runs."""
        in_outer_forward, self.in_forward = self.in_forward, True
        try:
            yield
        finally:
            self.in_forward = in_outer_forward

    @property
    def closed(self) -> bool:
        """Whether the engine has ended."""
        return bool(self.ended_by)

    @property
    def released(self) -> bool:
        """Whether the engine has ended and has given the model's parameters back."""
        return self.ended_by not in ("", "close()")

    def check_open(self, call: str, *, loads: bool = False) -> None:
        """The engine is open, and its state is of one step, unless ``call`` loads another one."""
        if self.ended_by == "close()":
            raise EngineStateError(
                f"{call} was called after close(), which drops the parameters' values: build the model again"
                " to initialize it, or end an engine with release() instead of close() to keep them"
            )
        if self.ended_by:
            raise EngineStateError(
                f"{call} was called after {self.ended_by}; initialize the model again, or use its new engine"
            )
        self._updates.check_usable(call, loads=loads)

    def check_between_steps(self, call: str, *, loads: bool = False) -> None:
        """The engine is open, and no pass and no gathered() block is running."""
        self.check_open(call, loads=loads)
        if self.in_forward or in_autograd():
            raise EngineStateError(
                f"{call} was called while a forward or backward is running; call it between steps"
            )
        self.give_up_unfinished()
        self._updates.settle_step(loads=loads)
        if self._parameters.lending:
            raise EngineStateError(f"{call} was called inside tiering.gathered(); end that block first")

    def check_no_gradients(self, call: str) -> None:
        """No gradients wait for their step."""
        if self._step.pending or self._accumulation.waiting:
            raise EngineStateError(
                f"{call} was called with gradients that no step has used, which it would lose; call it after the step()"
                " that uses them"
            )

    def check_trains(self, call: str) -> None:
        """There is an optimizer."""
        if not self._trains:
            raise EngineStateError(
                f"{call} was called on an engine without an optimizer, which does not train: to train, name one in the"
                ' configuration\'s optimizer section ({"type": "AdamW", "params": {"lr": 1e-4}}), or pass a torch'
                " optimizer to initialize(optimizer=...) or to the trainer"
            )

    def check_step(self) -> None:
        """A backward has ended since the last step."""
        if not self._step.pending:
            # Of the last one a part may be left: an I/O error that ended it is raised again.
            self._updates.settle_step()
            raise EngineStateError(
                "step was called without a backward since the last one; call backward(loss) of the engine first, or"
                " that of the trainer (accelerator.backward)"
            )
        if not self._accumulation.syncing:
            raise EngineStateError(
                "step was called inside no_sync(); call the last backward and step() outside of it"
            )

    def give_up_unfinished(self) -> None:
        """Reset a pass that an exception has ended outside the engine's calls (the user's loss.backward())."""
        # First: it waits until autograd has dropped a backward that an exception has ended.
        self._schedule.check_thread()
        if in_autograd():
            return
        if self._schedule.state.in_backward:
            self.give_up_backward()
        elif self._schedule.state is PassState.FORWARD:
            self._schedule.abandon()

    @uninterrupted
    def give_up_backward(self) -> None:
        """Reset after an exception in backward: the gradients since the last step are dropped."""
        # Before the gradients are dropped: it takes those off the parameters that no sink has accepted yet.
        self._schedule.abandon()
        if self._step.state is not StepState.UPDATED_IN_BACKWARD:
            self._updates.give_up()
            self._accumulation.drop()

    def drop_gradients(self) -> None:
        """Drop the gradients since the last step, and do not count their micro-batches."""
        if self._step.pending:
            self._step.to_idle()
        self._accumulation.drop()

    def warn_of_unused_gradients(self, call: str) -> None:
        """Warn, before ``call`` ends the engine, of micro-batches that no step has used."""
        if self._accumulation.waiting:
            log.warning(
                "%s drops the gradients of the last %d micro-batches, which no step has used: a step needs %d. Use a"
                " multiple of that per epoch, or call engine.set_gradient_accumulation_boundary(True) before the"
                " step() of the last micro-batch",
                *(call, self._accumulation.waiting, self._accumulation.steps),
            )

    def explain(self, error: BaseException, phase: Phase) -> None:
        """Add notes to ``error``, which has ended ``phase``: after an out-of-memory error, the state of the engine."""
        storages.explain(error)
        state = self._state_after(phase)
        out_of_memory.explain(error, self._tiers, state)
        if phase == "step" and self._updates.deferring and not isinstance(error, torch.OutOfMemoryError):
            error.add_note(f"{state}.")

    def _state_after(self, phase: Phase) -> str:
        if self._step.reason:
            return f"Close the engine ({self._step.reason}), and initialize the model again from a checkpoint"
        if phase == "step" and self._updates.deferring:
            return (
                f"Step {self._updates.steps} has begun. The next call that needs the parameters completes it"
            )
        if phase == "forward":
            together = "" if self._collectives is None else " if all ranks skip this batch"
            return f"The engine is in the state before this forward, and can continue{together}"
        return "No parameter was updated, and the gradients since the last step are lost; the engine can continue"


def check_loss(loss: object) -> None:
    """EngineStateError unless a backward can run from ``loss``."""
    if not isinstance(loss, Tensor):
        raise EngineStateError(f"backward needs the loss as a tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise EngineStateError(
            f"backward needs a scalar loss, not shape {tuple(loss.shape)}; reduce it, for example with .mean()"
        )
    if not loss.requires_grad:
        raise EngineStateError(
            "backward would compute no gradient, because the loss does not depend on a parameter: check that the"
            " forward does not run under no_grad(), that the output is not detached, and that the loss is not"
            " copied with torch.tensor(loss)"
        )
