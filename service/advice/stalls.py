"""What a rank's steps wait for, as the rules ask it. Pure: a RunView or a Snapshot in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from service.recent_steps import Recent, recent, steady
from service.view import RankView, RunView
from tiering.telemetry import COPIES_OF, DirectionStatus, Snapshot, StepRecord

FEWEST_STEPS = 3  # a median of fewer is chance
STALLED = 0.2  # of a step: below, what could be gained is within the spread of step times
BOUND = 0.5  # of a step: whatever takes most of it is what bounds it
TOLD = 0.05  # of the stalls: causes of less are left out

# Causes of waiting for other ranks, and of waiting for NVMe, if there is any. What begins with COPIES_OF is of the link
# to a device with memory of its own: it waits for what is in host memory already.
ON_RANKS = ("gather", "reduce", "agreement")
ON_NVME = ("parameters", "gradients", "optimizer state", "staging")

ALIKE = 0.8  # directions whose times differ by less are both behind a stall

Direction = Literal["reads", "writes", "reads and writes"]


class Stepping(NamedTuple):
    """A live rank with enough steps to tell something of them."""

    rank: RankView
    said: Snapshot
    waited: Recent


def stepping(run: RunView) -> list[Stepping]:
    """All of ``run``."""
    return [
        Stepping(rank, rank.snapshot, waited)
        for rank in run.ranks
        if rank.fresh
        and rank.snapshot is not None
        and (waited := recent(rank.snapshot)) is not None
        and waited.steps >= FEWEST_STEPS
    ]


def typical(one: Stepping, part: Callable[[StepRecord], float]) -> float:
    """The median of ``part`` over the recent steps."""
    return median(part(step) for step in steady(one.said))


def on_nvme(step: StepRecord) -> float:
    """Seconds of stall for NVMe."""
    return sum(step.stalls.get(cause, 0.0) for cause in ON_NVME)


def on_link(step: StepRecord) -> float:
    """Seconds of stall for copies."""
    return sum(waited for cause, waited in step.stalls.items() if cause.startswith(COPIES_OF))


def on_ranks(step: StepRecord) -> float:
    """Seconds of stall for other ranks."""
    return sum(step.stalls.get(cause, 0.0) for cause in ON_RANKS)


def outside(step: StepRecord) -> float:
    """Seconds between forward, backward and step, in which the engine has nothing to do."""
    return step.seconds - step.forward - step.backward - step.update


def busy(step: StepRecord) -> float:
    """Seconds in which the rank does not wait for others: all ranks take the same time with that."""
    return step.seconds - on_ranks(step)


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
