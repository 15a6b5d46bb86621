"""The micro-batches of an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tiering.config.training import TieringConfig
from tiering.errors import ConfigError


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


def accumulation_steps(train_batch_size: int, config: TieringConfig, world_size: int) -> int:
    """How many micro-batches make an update of ``train_batch_size`` samples. See Engine.set_train_batch_size."""
    samples = config.micro_batch_size * world_size
    if train_batch_size < samples or train_batch_size % samples:
        raise ConfigError(
            f"set_train_batch_size({train_batch_size}): a micro-batch on each of {world_size} ranks is {samples}"
            " samples; give a multiple of that"
        )
    steps = train_batch_size // samples
    has_fixed_dtype = config.tiering.grad_accum_dtype != "auto" or config.precision == "fp32"
    if not has_fixed_dtype and (steps > 1) != (config.gradient_accumulation_steps > 1):
        raise ConfigError(
            f"set_train_batch_size({train_batch_size}): gradients of several micro-batches are summed in fp32, those of"
            f" one are kept in {config.precision}, and memory was planned for"
            f' gradient_accumulation_steps {config.gradient_accumulation_steps}; set "tiering":'
            ' {"grad_accum_dtype": "fp32"} in the configuration'
        )
    return steps
