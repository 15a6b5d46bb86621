"""What a backward means for the update of the parameters: it begins the step, goes on with it, or makes it."""

from __future__ import annotations

from tiering.errors import EngineStateError
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation, StepState
from zero3.params.param_group import ParamGroup
from zero3.passes.prefetch import Prefetcher
from zero3.state.parameters import Parameters


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
        if self._updates.steps_ahead and self._updates.is_last_backward:
            self._updates.begin_in_backward()
        if not self._updates.steps_in_backward:
            return False
        self._updates.check_usable("backward")
        self._updates.current_step.check_one_backward()
        if self._updates.is_last_backward:
            self._parameters.check_before_update()
            self._parameters.store_edits_of_residents()
            self._updates.begin_in_backward()
        return self._updates.is_last_backward

    def on_gradient(self) -> None:
        self._updates.advance()

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
