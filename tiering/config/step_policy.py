"""StepPolicy: when a step updates the parameters (``tiering.step``)."""

from __future__ import annotations

from enum import StrEnum


class StepPolicy(StrEnum):
    """When a step updates the parameters. ``TieringConfig.conflicts_in_backward`` has the conditions of one of them."""

    AFTER = "after"
    """``step()`` updates all of them."""
    DEFERRED = "deferred"
    """``step()`` settles the update; a group that moves is updated before its next use, in the next forward."""
    IN_BACKWARD = "in_backward"
    """The last backward of a step updates each group as soon as its gradients are final."""
    AUTO = "auto"
    """The planner chooses one of the others (planning/step_choice.py), so no Workload has it."""
