"""A step that is begun while the last backward runs (tiering.step "in_backward" with two versions in swap space).

The norm is not known yet, so what is stepped goes to the second version of its pages. ``step()`` adopts it if the norm
asks for no clipping and nothing has changed since; otherwise it is taken back, which moves no byte, and all is stepped
in the usual order. Gradients stay until then. Whoever reads a parameter that was stepped takes the step back first.
"""

from __future__ import annotations

import logging
from collections import deque

from tiering import _logs
from tiering._interrupts import atomic
from tiering.errors import SwapError
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.param_group import ParamGroup
from zero3.passes.gradients import GradientStore

log = logging.getLogger(__name__)

RECENT = 10
"""Steps, of which the last ones decide whether the next one is begun ahead."""
MOST_IN_VAIN = 1 / 5
"""Of the recent steps, the most that were begun in vain, or would have been."""


class StepAhead:
    """Steps the ``groups`` in backward, as soon as their ``gradients`` are final.

    ``under_way``: a step is begun, and neither adopted nor taken back. ``pays``: the next step is begun ahead, because
    few of the recent ones were taken back.
    """

    def __init__(
        self, optimizer: TieredOptimizer, gradients: GradientStore, groups: frozenset[ParamGroup]
    ) -> None:
        self.groups = groups
        self.under_way = False
        self.pays = True
        self._grad_scale = 1.0
        self._optimizer = optimizer
        self._gradients = gradients
        self._in_vain = False  # the next step was begun once, and taken back
        self._final: dict[ParamGroup, None] = {}  # with final gradients, and not stepped yet
        self._recent: deque[bool] = deque(maxlen=RECENT)  # whether each step was, or would have been, in vain

    def begin(self, grad_scale: float) -> None:
        """The last backward before an update begins, whose gradients are multiplied by ``grad_scale``."""
        self._optimizer.prepare_ahead()
        self._grad_scale = grad_scale
        self._final.clear()
        with atomic():
            self._optimizer.begin_ahead(grad_scale, self.groups)
            self.under_way = True
        self._optimizer.stepper.read_ahead()

    def advance(self) -> None:
        """Step what is final and has arrived."""
        if not self.under_way:
            return
        try:
            self._final.update(dict.fromkeys(self._gradients.take_final()))
            for group in [group for group in self._final if not group.is_used_at_home]:
                del self._final[group]
                if group in self.groups:
                    self._optimizer.step_ahead(group)
            self._optimizer.stepper.advance()
        except SwapError as error:
            self.take_back()
            log.warning("a step that was begun in backward begins again after it: %s", error)

    def before_read(self, group: ParamGroup) -> None:
        """``group`` is about to be read: until ``step()`` it has its old values, once they are restored."""
        if self.under_way and self._optimizer.was_stepped_ahead(group):
            self.take_back()

    def restore(self, group: ParamGroup | None = None, *, wait: bool = True) -> bool:
        """Restore the old values of ``group``, or of all, after a step was taken back.

        No step is under way. Returns False if bytes have to be read for that, unless ``wait`` is set.
        """
        return self._optimizer.stepper.overwritten.restore(group, wait=wait)

    def is_right(self, grad_scale: float, *, unclipped: bool) -> bool:
        """The norm is known, and the gradients are finite: whether what was stepped ahead is right.

        ``grad_scale`` is that of ``begin``, as it is now. Then the caller prepares the rest, and calls ``adopt``.
        Otherwise what was stepped ahead is taken back.
        """
        is_same = grad_scale == self._grad_scale
        is_right = self.under_way and unclipped and is_same and self._optimizer.may_adopt()
        if not is_right:
            self.take_back()
        self._note(in_vain=self._in_vain or not unclipped)
        return is_right

    def adopt(self) -> None:
        """What was stepped ahead stays. The caller's block is atomic."""
        self.under_way = False
        self._optimizer.adopt()

    def skip(self) -> None:
        """The gradients are not finite: nothing is updated."""
        self.take_back()
        self._note(in_vain=True)

    def take_back(self) -> None:
        """Undo what was stepped ahead, if anything was, except for parameters that ``restore`` restores."""
        with atomic():
            if self.under_way:
                # First: an exception below leaves nothing that could be adopted.
                self.under_way, self._in_vain = False, True
                self._optimizer.take_back()

    def _note(self, *, in_vain: bool) -> None:
        self._in_vain = False
        self._recent.append(in_vain)
        pays = sum(self._recent) <= MOST_IN_VAIN * len(self._recent)
        if pays is not self.pays:
            self.pays = pays
            log.log(
                _logs.once(logging.INFO),
                "steps are %s begun in backward: %d of the last %d were taken back, clipped or skipped",
                *("again" if pays else "not", sum(self._recent), len(self._recent)),
            )
