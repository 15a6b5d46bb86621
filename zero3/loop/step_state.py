"""The states of a step, from the first gradient to the update, and what may follow each of them."""

from __future__ import annotations

from enum import Enum, auto

from tiering.errors import EngineStateError

NOT_LOADED = "load_checkpoint did not end"


class StepState(Enum):
    """Where the update of the parameters is, between the calls of a training loop.

    In the first three states parameters and optimizer state are of one step.
    """

    IDLE = auto()
    """No backward has ended since the last ``step()``. Earlier micro-batches may have left gradients."""
    PENDING = auto()
    """A backward has ended: ``step()`` may be called."""
    UPDATED_IN_BACKWARD = auto()
    """The last backward has updated all parameters (tiering.step_in_backward): ``step()`` has to be called."""
    UPDATING_IN_BACKWARD = auto()
    """A backward runs, and has updated some of the parameters."""
    UPDATING = auto()
    """``step()`` is updating the parameters."""
    LOADING = auto()
    """A checkpoint has been loaded in part. Loading another one makes the engine whole."""
    TORN = auto()
    """An update has ended half way: the engine can only be closed."""
    OUT_OF_STEP = auto()
    """This rank has lost a backward that other ranks count: the engine can only be closed."""


_BROKEN = (StepState.LOADING, StepState.TORN, StepState.OUT_OF_STEP)


class CurrentStep:
    """The ``state``, the ``reason`` for one that does not train, and the transitions.

    Each transition names the states that it may leave. Training cannot leave LOADING, TORN and OUT_OF_STEP: a pass that
    the program runs all the same, by the module itself, changes nothing.
    """

    def __init__(self) -> None:
        self.state = StepState.IDLE
        self.reason = ""

    @property
    def pending(self) -> bool:
        """Whether ``step()`` has something to use."""
        return self.state in (StepState.PENDING, StepState.UPDATED_IN_BACKWARD)

    @property
    def broken(self) -> str:
        """Why nothing but ``close`` is left; empty if that is not so."""
        return self.reason if self.state in (StepState.TORN, StepState.OUT_OF_STEP) else ""

    def to_pending(self) -> None:
        """A backward has ended, or a gradient was set."""
        if self.state is not StepState.UPDATED_IN_BACKWARD:
            self._to(StepState.PENDING, StepState.IDLE, StepState.PENDING)

    def to_updating_in_backward(self) -> None:
        """The backward that updates parameters has brought its first gradient."""
        self._to(StepState.UPDATING_IN_BACKWARD, StepState.IDLE, StepState.PENDING)

    def to_updated_in_backward(self) -> None:
        """That backward has ended."""
        self._to(StepState.UPDATED_IN_BACKWARD, StepState.UPDATING_IN_BACKWARD)

    def to_updating(self) -> None:
        """``step()`` is about to change the first parameter."""
        self._to(StepState.UPDATING, StepState.PENDING)

    def end_micro_batch(self) -> None:
        """``step()`` has ended a micro-batch. What a backward has updated already still has to be counted."""
        if self.state is StepState.PENDING:
            self.to_idle()

    def to_idle(self) -> None:
        """The gradients were used, or are dropped."""
        self._to(
            StepState.IDLE,
            *(StepState.IDLE, StepState.PENDING, StepState.UPDATED_IN_BACKWARD, StepState.UPDATING),
        )

    def to_torn(self, reason: str) -> None:
        """An update has ended half way."""
        self._to(StepState.TORN, *StepState, reason=reason)

    def to_out_of_step(self, reason: str) -> None:
        """A backward was ended by an exception on this rank, and other ranks do not know of it."""
        self._to(StepState.OUT_OF_STEP, *StepState, reason=reason)

    def to_loading(self) -> None:
        """A checkpoint is about to replace parameters and state."""
        assert self.state in (StepState.IDLE, StepState.LOADING), self.state
        self.state, self.reason = StepState.LOADING, NOT_LOADED

    def to_loaded(self) -> None:
        """All of the checkpoint is there."""
        assert self.state is StepState.LOADING, self.state
        self.state, self.reason = StepState.IDLE, ""

    def check_one_backward(self) -> None:
        """EngineStateError if an earlier backward has updated the parameters and no step() has followed."""
        if self.state in (StepState.UPDATING_IN_BACKWARD, StepState.UPDATED_IN_BACKWARD):
            raise EngineStateError(
                "a second backward before step(): tiering.step_in_backward has updated the parameters in the first"
                " one. Call step() after each backward, sum the losses, or set step_in_backward to false"
            )

    def _to(self, state: StepState, *leaves: StepState, reason: str = "") -> None:
        if self.state in _BROKEN:
            return
        assert self.state in leaves, f"a step in state {self.state.name} cannot become {state.name}"
        self.state, self.reason = state, reason
