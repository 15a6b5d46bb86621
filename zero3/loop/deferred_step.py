"""A step that has begun, and is not applied to all parameters yet.

``step()`` has agreed on the norm, the scale and the options, and has counted the step and queued its tiles: from then
on, the step is certain. With tiering.step "deferred", most groups are updated before their next use, and state on NVMe
moves while forward computes. In the same way a step goes on that an exception has interrupted, as an I/O error or a
second Ctrl-C: whoever needs the parameters or the state next completes it. Forward does so when it begins, and group by
group; all others call ``finish``.
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
    """Applies what ``stepper`` has queued, last to ``groups``, and then drops the gradients in ``sink``.

    ``under_way``: a part of the last step is not applied yet. The calls after ``begin`` are for that time.
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
        self._started = True

    def begin(self, number: int) -> None:
        """Step ``number`` is counted and queued. The caller's block is atomic."""
        self._number, self.under_way, self._started = number, True, False

    def start(self) -> None:
        """Apply the step to the groups that are not deferred; nothing if that is done."""
        if self._started:
            return
        with self._applying("update"), kernels.step_under_way():
            if self.groups:
                self._stepper.begin_deferred()
                for group in self._stepper.groups:
                    if group not in self.groups:
                        self._stepper.step_group(group, wait=True)
            else:
                self._stepper.finish()
            self._started = True

    def apply(self, group: ParamGroup, *, wait: bool) -> bool:
        """Apply the step to ``group``. Returns False if bytes of the group have not arrived, unless ``wait`` is set."""
        with self._applying():
            return self._stepper.step_group(group, wait=wait)

    def finish(self) -> None:
        """Apply the step to all groups."""
        with self._applying(wait=True), kernels.step_under_way():
            self._stepper.finish()

    @contextmanager
    def _applying(self, span: str = "deferred update", *, wait: bool = False) -> Iterator[None]:
        """The block applies a part of the step. After an exception, the next block goes on where it ended.

        ``wait`` for what has to be written.
        """
        with deferred_interrupts(), self._timeline.span("compute", span):
            try:
                yield
            except BaseException as error:
                if self._stepper.torn:
                    self._current_step.to_torn_by(error, self._number)
                    self.under_way, self._started = False, True
                raise
            # Gradients stay until then: a tile whose write fails is updated again.
            if not self._stepper.has_due and self._stepper.check_written(wait=wait):
                self._stepper.publish()
                self._sink.reset()
                self.under_way, self._started = False, True
