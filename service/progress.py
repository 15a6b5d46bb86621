"""Whether a rank makes progress: for how long its current phase may last. A heartbeat only shows a live process."""

from __future__ import annotations

from dataclasses import dataclass

from service.recent_steps import recent_steps
from tiering.telemetry import Snapshot

MIN_STEPS = 3  # for a meaningful median
# A phase of a step is stuck after the longer of these: usual steps, and seconds.
STUCK_STEPS, STUCK_SECONDS = 10.0, 60.0
# Between steps, where a program also evaluates and saves, after the longer of these.
IDLE_STEPS, IDLE_SECONDS = 20.0, 120.0
# Before there are usual steps, and while a checkpoint is saved. A start or a compilation takes less time.
HUNG_SECONDS = 600.0


@dataclass(frozen=True)
class PhaseDuration:
    """How long a rank has been in its phase, and the ``limit`` from which on it is stuck, in seconds.

    ``step_seconds`` is the usual duration of a step, if it is known.
    """

    seconds: float
    limit: float
    step_seconds: float | None

    @property
    def is_stuck(self) -> bool:
        return self.seconds >= self.limit


def phase_duration(snapshot: Snapshot, published_at: float | None) -> PhaseDuration | None:
    """The duration of the phase at the time of the publication; None if it is unknown."""
    if not snapshot.phase_since or published_at is None:
        return None
    steps = recent_steps(snapshot)
    usual = steps.seconds if steps is not None and steps.steps >= MIN_STEPS else None
    saves = snapshot.checkpoint is not None and snapshot.checkpoint.under_way
    if usual is None or (saves and snapshot.phase == "idle"):
        limit = HUNG_SECONDS
    elif snapshot.phase in ("forward", "backward", "step"):
        limit = max(STUCK_SECONDS, STUCK_STEPS * usual)
    else:
        limit = max(IDLE_SECONDS, IDLE_STEPS * usual)
    return PhaseDuration(published_at - snapshot.phase_since, limit, usual)


def last_step_at(snapshot: Snapshot) -> float | None:
    """Unix time at which the rank's last step ended."""
    return snapshot.steps[-1].ended_at or None if snapshot.steps else None
