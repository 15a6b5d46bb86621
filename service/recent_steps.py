"""What the recent steps of a rank took, and what they waited for: the one definition for all that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from tiering.telemetry import Snapshot, StepRecord


@dataclass(frozen=True)
class Recent:
    """So many steady steps: seconds of the median one, and of the time of all of them the share of stalls, by cause.

    Causes are in the order of their shares, those without any left out.
    """

    steps: int
    seconds: float
    share: float
    causes: Mapping[str, float]

    def on(self, causes: Iterable[str]) -> float:
        """The share of the stalls by these causes."""
        return sum(self.causes.get(cause, 0.0) for cause in causes)


def steady(said: Snapshot) -> list[StepRecord]:
    """The recent steps without the first, which finds the order of groups and fills what later steps find full."""
    return [step for step in said.steps if step.step > 1]


def recent(said: Snapshot) -> Recent | None:
    """None before the first steady step."""
    steps = steady(said)
    total = sum(step.seconds for step in steps)
    if total <= 0:
        return None
    causes = Counter[str]()
    for step in steps:
        causes.update(step.stalls)
    return Recent(
        steps=len(steps),
        seconds=median(step.seconds for step in steps),
        share=sum(step.stall for step in steps) / total,
        causes={cause: waited / total for cause, waited in causes.most_common() if waited > 0},
    )
