"""The states of a pass and of a step: every transition from every state, legal or refused."""

from __future__ import annotations

import pytest

from tiering.errors import EngineStateError
from zero3.loop.step_state import NOT_LOADED, CurrentStep, StepState
from zero3.passes.pass_state import CurrentPass, PassState

BROKEN = (StepState.LOADING, StepState.TORN, StepState.OUT_OF_STEP)
PASSES = {  # by transition: where it leads, and from which states
    "to_forward": ("FORWARD", "IDLE BACKWARD ACCUMULATING STEPPING"),
    "to_backward": ("BACKWARD", "IDLE FORWARD"),
    "to_accumulating": ("ACCUMULATING", "BACKWARD"),
    "to_stepping": ("STEPPING", "ACCUMULATING"),
    "to_idle": ("IDLE", "IDLE FORWARD BACKWARD ACCUMULATING STEPPING"),
    "to_closed": ("CLOSED", "IDLE"),
}
STEPS = {
    "to_pending": ("PENDING", "IDLE PENDING"),
    "to_updating_in_backward": ("UPDATING_IN_BACKWARD", "IDLE PENDING"),
    "to_updated_in_backward": ("UPDATED_IN_BACKWARD", "UPDATING_IN_BACKWARD"),
    "to_idle": ("IDLE", "IDLE PENDING UPDATED_IN_BACKWARD"),
    "to_torn": ("TORN", "IDLE PENDING UPDATED_IN_BACKWARD UPDATING_IN_BACKWARD"),
    "to_out_of_step": ("OUT_OF_STEP", "IDLE PENDING UPDATED_IN_BACKWARD UPDATING_IN_BACKWARD"),
}
STAY = {("to_pending", "UPDATED_IN_BACKWARD")}  # step() still has to count what backward has updated


@pytest.mark.parametrize("state", PassState)
@pytest.mark.parametrize("transition", PASSES)
def test_a_pass_goes_where_it_may(transition: str, state: PassState) -> None:
    target, legal = PASSES[transition]
    current = CurrentPass()
    current.state = state
    if state.name in legal.split():
        getattr(current, transition)()
        assert current.state is PassState[target]
    else:
        with pytest.raises(AssertionError, match=state.name):
            getattr(current, transition)()
        assert current.state is state


@pytest.mark.parametrize("state", StepState)
@pytest.mark.parametrize("transition", STEPS)
def test_a_step_goes_where_it_may_and_stays_broken(transition: str, state: StepState) -> None:
    target, legal = STEPS[transition]
    current = CurrentStep()
    current.state, current.reason = state, "before" if state in BROKEN else ""
    reason = ("it failed",) if target in ("TORN", "OUT_OF_STEP") else ()
    if state in BROKEN or (transition, state.name) in STAY:
        getattr(current, transition)(*reason)
        assert (current.state, bool(current.reason)) == (state, state in BROKEN)
    elif state.name in legal.split():
        getattr(current, transition)(*reason)
        assert (current.state, current.reason) == (StepState[target], "".join(reason))
        assert current.broken == current.reason
    else:
        with pytest.raises(AssertionError, match=state.name):
            getattr(current, transition)(*reason)
        assert current.state is state


@pytest.mark.parametrize("state", StepState)
def test_a_load_that_ended_half_way_is_made_good_by_another(state: StepState) -> None:
    current = CurrentStep()
    current.state = state
    if state in (StepState.IDLE, StepState.LOADING):
        current.to_loading()
        assert (current.state, current.reason, current.broken) == (StepState.LOADING, NOT_LOADED, "")
        current.to_loaded()
        assert (current.state, current.reason) == (StepState.IDLE, "")
    else:
        with pytest.raises(AssertionError):
            current.to_loading()


@pytest.mark.parametrize("state", StepState)
def test_the_end_of_a_micro_batch_leaves_only_what_was_pending(state: StepState) -> None:
    current = CurrentStep()
    current.state = state
    current.end_micro_batch()
    assert current.state is (StepState.IDLE if state is StepState.PENDING else state)
    assert current.pending == (state is StepState.UPDATED_IN_BACKWARD)


@pytest.mark.parametrize("state", StepState)
def test_one_backward_updates(state: StepState) -> None:
    current = CurrentStep()
    current.state = state
    if state in (StepState.UPDATED_IN_BACKWARD, StepState.UPDATING_IN_BACKWARD):
        with pytest.raises(EngineStateError, match=r"a second backward before step\(\)"):
            current.check_one_backward()
    else:
        current.check_one_backward()
