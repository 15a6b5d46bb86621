"""The duration and the stalls of a rank's recent steps: the definition that all outputs use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from tiering.telemetry import Snapshot, StepRecord


@dataclass(frozen=True)
class RecentSteps:
    """The steady steps among the recent ones.

    ``steps`` is their number, ``seconds`` the median duration, and ``share`` the part of their total time that was
    stall, 0 to 1. ``causes`` has the share of each cause that occurred, the largest first. ``tokens_per_second`` and
    ``flops_per_second`` are those of the rank over this time; None if it tells none.
    """

    steps: int
    seconds: float
    share: float
    causes: Mapping[str, float]
    tokens_per_second: float | None = None
    flops_per_second: float | None = None

    def stalled_on(self, causes: Iterable[str]) -> float:
        """The share of the time that was stall by these causes."""
        return sum(self.causes.get(cause, 0.0) for cause in causes)


def steady_steps(snapshot: Snapshot) -> list[StepRecord]:
    """The recent steps without the run's first, which records the order of groups and fills empty buffers."""
    return [step for step in snapshot.steps if step.step > 1]


def recent_steps(snapshot: Snapshot) -> RecentSteps | None:
    """None before the first steady step."""
    steps = steady_steps(snapshot)
    total = sum(step.seconds for step in steps)
    if total <= 0:
        return None
    causes = Counter[str]()
    for step in steps:
        causes.update(step.stalls)
    return RecentSteps(
        steps=len(steps),
        seconds=median(step.seconds for step in steps),
        share=sum(step.stall for step in steps) / total,
        causes={cause: seconds / total for cause, seconds in causes.most_common() if seconds > 0},
        tokens_per_second=sum(step.tokens for step in steps) / total or None,
        flops_per_second=sum(step.flops for step in steps) / total or None,
    )
