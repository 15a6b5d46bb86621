"""Whether a rank's steps wait for NVMe, and for which direction. Pure: a Snapshot in, figures out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from service.recent import Recent as Waits
from service.recent import recent, steady
from tiering.telemetry import DirectionStatus, Snapshot

__all__ = ["ON_NVME", "ON_RANKS", "Waits", "direction", "steady", "waits"]

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


def waits(said: Snapshot) -> Waits | None:
    """None while there are too few steps to tell."""
    found = recent(said)
    return found if found is not None and found.steps >= FEWEST_STEPS else None


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
