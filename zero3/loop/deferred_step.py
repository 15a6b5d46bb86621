"""A step that is applied to each group before its next use (tiering.step "deferred").

``step()`` has agreed on the norm, the scale and the options, and has queued the tiles. State on NVMe then moves while
forward computes. Whoever reads or changes parameters or state in another way calls ``finish`` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optim_cpu import kernels
from tiering._interrupts import deferred_interrupts
from zero3.device.timeline import Timeline
from zero3.loop.step_state import CurrentStep
from zero3.optimizer.tile_stepper import TileStepper
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import GradientStore
from zero3.passes.reduction import GradientReducer


class DeferredStep:
    """Applies what ``stepper`` has queued to the ``groups``, and then drops the gradients in ``sink``.

    ``under_way``: a part of the last step is not applied yet.
    """

    def __init__(
        self,
        stepper: TileStepper,
        groups: frozenset[ParamGroup],
        sink: GradientStore | GradientReducer,
        current_step: CurrentStep,
        timeline: Timeline,
    ) -> None:
        self.groups = groups
        self.under_way = False
        self._stepper = stepper
        self._sink = sink
        self._current_step = current_step
        self._timeline = timeline
        self._number = 0  # of the step

    def begin(self, number: int) -> None:
        """Step ``number`` is queued."""
        self._number, self.under_way = number, self._stepper.has_due

    def apply(self, group: ParamGroup, *, wait: bool) -> bool:
        """Apply the step to ``group``. Returns False if bytes of the group have not arrived, unless ``wait`` is set."""
        if not self.under_way:
            return True
        with self._applying():
            return self._stepper.step_group(group, wait=wait)

    def finish(self) -> None:
        """Apply the step to all groups."""
        if self.under_way:
            with self._applying(), kernels.step_under_way():
                self._stepper.finish()

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """The block applies a part of the step."""
        with (
            deferred_interrupts(),
            self._current_step.tearing(self._number),
            self._timeline.span("compute", "deferred update"),
        ):
            try:
                yield
            except BaseException:
                # The engine can only be closed: nothing continues the step.
                self.under_way = False
                raise
            if not self._stepper.has_due:
                self.under_way = False
                self._sink.reset()
