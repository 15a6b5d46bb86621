"""What a rank's steps wait for: stalls by cause, and whether NVMe is behind them. Pure: a Snapshot in, figures out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tiering.telemetry import DirectionStatus, Snapshot, StepRecord

FEWEST_STEPS = 3  # a median of fewer is chance
ON_RANKS = ("gather", "reduce", "agreement")  # causes of waiting for other ranks
ON_NVME = (
    "parameters",
    "gradients",
    "optimizer state",
    "staging",
)  # causes of waiting for NVMe, if there is any
ALIKE = 0.8  # reads and writes whose times differ by less are both behind a stall

Direction = Literal["reads", "writes", "reads and writes"]


@dataclass(frozen=True)
class Waits:
    """The recent steps of a rank: seconds of the median one, and of all of them the share of stalls by cause."""

    steps: int
    seconds: float
    share: float
    causes: Mapping[str, float]

    def on(self, causes: Sequence[str]) -> float:
        """The share of the stalls by these causes."""
        return sum(self.causes.get(cause, 0.0) for cause in causes)


def steady(said: Snapshot) -> list[StepRecord]:
    """The recent steps without the first, which finds the order of groups and fills what later steps find full."""
    return [step for step in said.steps if step.step > 1]


def waits(said: Snapshot) -> Waits | None:
    """None while there are too few steps to tell."""
    steps = steady(said)
    total = sum(step.seconds for step in steps)
    if len(steps) < FEWEST_STEPS or total <= 0:
        return None
    causes = Counter[str]()
    for step in steps:
        causes.update(step.stalls)
    stalled = sum(step.stall for step in steps)
    shares = {cause: waited / total for cause, waited in causes.most_common() if waited > 0}
    return Waits(len(steps), median(step.seconds for step in steps), stalled / total, shares)


def direction(said: Snapshot) -> Direction:
    """Which takes longer of what a recent step reads and writes, at the rates that the paths have while busy."""
    steps = steady(said)
    reading = sum(step.read_bytes for step in steps) / max(1.0, _rate([path.read for path in said.io]))
    writing = sum(step.written_bytes for step in steps) / max(1.0, _rate([path.written for path in said.io]))
    if min(reading, writing) >= ALIKE * max(reading, writing):
        return "reads and writes"
    return "reads" if reading > writing else "writes"


def _rate(directions: Sequence[DirectionStatus]) -> float:
    return sum(one.average_bytes_per_second for one in directions)
