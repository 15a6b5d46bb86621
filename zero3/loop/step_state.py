"""The progress of a step: its states, from the first gradient to the update, and its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError

NOT_LOADED = "load_checkpoint did not end"
NOT_RESUMED = "initialize(resume=...) has left them to load_checkpoint"


class StepState(Enum):
    """The state of the update between the calls of a training loop.

    In the first three states, parameters and optimizer state are of the same step, or a part of the last step is still
    to be applied (deferred_step.py).
    """

    IDLE = auto()
    """No backward has ended since the last ``step()``. Earlier micro-batches may have left gradients."""
    PENDING = auto()
    """A backward has ended: ``step()`` may be called."""
    UPDATED_IN_BACKWARD = auto()
    """The last backward has updated all parameters (step 'in_backward'): ``step()`` must be called next."""
    UPDATING_IN_BACKWARD = auto()
    """A backward runs, and has updated some of the parameters."""
    LOADING = auto()
    """A checkpoint is loaded in part, or has to be loaded first. A complete load leads back to IDLE."""
    TORN = auto()
    """An exception has interrupted an update that cannot be continued: the engine can only be closed."""
    OUT_OF_STEP = auto()
    """This rank has lost a backward that other ranks count: the engine can only be closed."""


_BROKEN = (StepState.LOADING, StepState.TORN, StepState.OUT_OF_STEP)


class CurrentStep:
    """The ``state``, the ``reason`` if it does not allow training, and the transitions.

    Each transition checks the state that it leaves. Training cannot leave LOADING, TORN and OUT_OF_STEP: a pass that
    a script runs there, by the module itself, changes nothing.
    """

    def __init__(self) -> None:
        self.state = StepState.IDLE
        self.reason = ""

    @property
    def pending(self) -> bool:
        """Whether ``step()`` may be called."""
        return self.state in (StepState.PENDING, StepState.UPDATED_IN_BACKWARD)

    @property
    def broken(self) -> str:
        """The reason why the engine can only be closed, or ""."""
        return self.reason if self.state in (StepState.TORN, StepState.OUT_OF_STEP) else ""

    def to_pending(self) -> None:
        """A backward has ended, or a gradient was set."""
        if self.state is not StepState.UPDATED_IN_BACKWARD:
            self._to(StepState.PENDING, StepState.IDLE, StepState.PENDING)

    def to_updating_in_backward(self) -> None:
        """The first gradient of a backward that updates parameters has arrived."""
        self._to(StepState.UPDATING_IN_BACKWARD, StepState.IDLE, StepState.PENDING)

    def to_updated_in_backward(self) -> None:
        """That backward has ended."""
        self._to(StepState.UPDATED_IN_BACKWARD, StepState.UPDATING_IN_BACKWARD)

    def end_micro_batch(self) -> None:
        """``step()`` has ended a micro-batch. UPDATED_IN_BACKWARD stays: the update is not counted yet."""
        if self.state is StepState.PENDING:
            self.to_idle()

    def to_idle(self) -> None:
        """The gradients are used or dropped, or a step that has begun will use them."""
        self._to(StepState.IDLE, StepState.IDLE, StepState.PENDING, StepState.UPDATED_IN_BACKWARD)

    def to_torn(self, reason: str) -> None:
        """An exception has interrupted an update that cannot be continued."""
        self._to(StepState.TORN, *StepState, reason=reason)

    def to_torn_by(self, error: BaseException, step: int) -> None:
        """``error`` has interrupted ``step``."""
        self.to_torn(f"step {step} was ended by {type(error).__name__}: {error}")

    @contextmanager
    def tearing(self, step: int) -> Iterator[None]:
        """After an exception in the block, parameters and state are of two steps: training on them is refused."""
        try:
            yield
        except BaseException as error:
            self.to_torn_by(error, step)
            raise

    def to_out_of_step(self, reason: str) -> None:
        """An exception has ended a backward on this rank, which other ranks do not know."""
        self._to(StepState.OUT_OF_STEP, *StepState, reason=reason)

    def to_loading(self, reason: str = NOT_LOADED) -> None:
        """A checkpoint is about to replace parameters and state."""
        assert self.state in (StepState.IDLE, StepState.LOADING), self.state
        self.state, self.reason = StepState.LOADING, reason

    def to_loaded(self) -> None:
        """The checkpoint is loaded completely."""
        assert self.state is StepState.LOADING, self.state
        self.state, self.reason = StepState.IDLE, ""

    def check_one_backward(self) -> None:
        """EngineStateError if an earlier backward has updated the parameters and no step() has followed."""
        if self.state in (StepState.UPDATING_IN_BACKWARD, StepState.UPDATED_IN_BACKWARD):
            raise EngineStateError(
                "a second backward before step(): tiering.step 'in_backward' has updated the parameters in the first"
                " one. Call step() after each backward, sum the losses, or set step to 'deferred' or 'after'"
            )

    def _to(self, state: StepState, *leaves: StepState, reason: str = "") -> None:
        if self.state in _BROKEN:
            return
        assert self.state in leaves, f"a step in state {self.state.name} cannot become {state.name}"
        self.state, self.reason = state, reason


class Accumulation:
    """Counts micro-batches. An update has ``steps`` of them, unless the script sets ``boundary``.

    ``micro_steps`` counts all micro-batches, ``waiting`` those whose gradients no update has used. ``scaled`` counts
    scaled losses without a backward so far. ``syncing`` is False inside no_sync.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.waiting = 0
        self.boundary: bool | None = None
        self.scaled = 0
        self.syncing = True
        self._loop_counts = False

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        return self.waiting + 1 >= self.steps if self.boundary is None else self.boundary

    def leave_to_loop(self) -> None:
        """From now on the loop counts its micro-batches: it divides losses, and calls step() for updates only."""
        self.steps, self._loop_counts = 1, True

    def resize(self, steps: int) -> None:
        """From now on an update has ``steps`` micro-batches, unless the loop counts them."""
        if not self._loop_counts:
            self.steps = steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context manager: backwards in its block do not complete the gradients."""
        syncing_before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = syncing_before

    @contextmanager
    def one_backward(self) -> Iterator[None]:
        """A block that scales one loss and runs its backward, which counts no scaled loss afterwards."""
        scaled_before = self.scaled
        try:
            yield
        finally:
            self.scaled = scaled_before

    def note_scaled(self) -> None:
        """A loss is scaled: a backward follows."""
        self.scaled += 1

    def note_backward(self) -> None:
        """A backward has ended, as a rule that of a scaled loss."""
        self.scaled = max(0, self.scaled - 1)

    def count(self, *, updated: bool) -> None:
        """A micro-batch has ended. ``updated``: an update has used its gradients."""
        self.micro_steps += 1
        self.waiting = 0 if updated else self.waiting + 1

    def drop(self) -> None:
        """The gradients since the last update are dropped: do not count their micro-batches."""
        self.micro_steps -= self.waiting
        self.waiting = 0

    def resume(self, micro_steps: int) -> None:
        """Continue after ``micro_steps`` micro-batches; those after the last update are waiting."""
        self.micro_steps = micro_steps
        self.waiting = micro_steps % self.steps


def accumulation_steps(train_batch_size: int, config: TieringConfig) -> int:
    """How many micro-batches make an update of ``train_batch_size`` samples. See Engine.set_train_batch_size."""
    samples = config.micro_batch_size * config.data_ranks
    if train_batch_size < samples or train_batch_size % samples:
        raise ConfigError(
            f"set_train_batch_size({train_batch_size}): a micro-batch on each of {config.data_ranks} ranks is {samples}"
            " samples; give a multiple of that"
        )
    steps = train_batch_size // samples
    # Chunks of rows are summed in fp32 as well.
    always_sums = config.precision == "fp32" or config.tiering.block_rows is not None
    has_fixed_dtype = config.tiering.grad_accum_dtype != "auto" or always_sums
    if not has_fixed_dtype and (steps > 1) != (config.gradient_accumulation_steps > 1):
        raise ConfigError(
            f"set_train_batch_size({train_batch_size}): gradients of several micro-batches are summed in fp32, those of"
            f" one are kept in {config.precision}, and memory was planned for"
            f' gradient_accumulation_steps {config.gradient_accumulation_steps}; set "tiering":'
            ' {"grad_accum_dtype": "fp32"} in the configuration'
        )
    return steps
