"""Figures about the stalls of a rank's recent steps, for several rules. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from service.progress import MIN_STEPS
from service.recent_steps import RecentSteps, steady_steps
from service.view import RankView, RunView
from tiering.telemetry import COPIES_OF, DirectionStatus, Snapshot, StepRecord

STALL_FRACTION = 0.2  # of a step: the gain from less stall is within the spread of step times
BOUND_FRACTION = 0.5  # of a step: a stall that takes more than this bounds the step
MIN_CAUSE_FRACTION = 0.05  # of the stalls: smaller causes are left out of the text

# Causes of stalls for other ranks, and for NVMe if the run uses it. Causes that begin with COPIES_OF are stalls for the
# link to a device with its own memory: the data is already in host memory.
ON_RANKS = ("gather", "reduce", "agreement")
ON_NVME = ("parameters", "gradients", "optimizer state", "staging", "activations")

# Two directions both cause a stall if the shorter time is at least this fraction of the longer one.
SIMILAR_FRACTION = 0.8

Direction = Literal["reads", "writes", "reads and writes"]


class SteppingRank(NamedTuple):
    """A live rank with at least MIN_STEPS recent steps."""

    rank: RankView
    snapshot: Snapshot
    steps: RecentSteps


def stepping_ranks(run: RunView) -> list[SteppingRank]:
    """The live ranks of ``run`` that have enough recent steps."""
    return [
        SteppingRank(rank, rank.snapshot, steps)
        for rank in run.ranks
        if rank.fresh
        and rank.snapshot is not None
        and (steps := rank.recent_steps) is not None
        and steps.steps >= MIN_STEPS
    ]


def typical(rank: SteppingRank, part: Callable[[StepRecord], float]) -> float:
    """The median of ``part`` over the recent steps."""
    return median(part(step) for step in steady_steps(rank.snapshot))


def on_nvme(step: StepRecord) -> float:
    """Seconds of stall for NVMe."""
    return sum(step.stalls.get(cause, 0.0) for cause in ON_NVME)


def on_link(step: StepRecord) -> float:
    """Seconds of stall for copies."""
    return sum(seconds for cause, seconds in step.stalls.items() if cause.startswith(COPIES_OF))


def on_ranks(step: StepRecord) -> float:
    """Seconds of stall for other ranks."""
    return sum(step.stalls.get(cause, 0.0) for cause in ON_RANKS)


def outside(step: StepRecord) -> float:
    """Seconds between forward, backward and step, in which the engine does nothing."""
    return step.seconds - step.forward - step.backward - step.update


def busy(step: StepRecord) -> float:
    """Seconds of the step without the stall for other ranks. With it, a step takes equally long on all ranks."""
    return step.seconds - on_ranks(step)


def direction(snapshot: Snapshot) -> Direction:
    """The direction in which a recent step's transfers take longer, at the average rates of the paths."""
    steps = steady_steps(snapshot)
    reading = sum(step.read_bytes for step in steps) / max(1.0, _rate([path.read for path in snapshot.io]))
    writing = sum(step.written_bytes for step in steps) / max(
        1.0, _rate([path.written for path in snapshot.io])
    )
    if min(reading, writing) >= SIMILAR_FRACTION * max(reading, writing):
        return "reads and writes"
    return "reads" if reading > writing else "writes"


def _rate(directions: Sequence[DirectionStatus]) -> float:
    return sum(path.average_bytes_per_second for path in directions)
