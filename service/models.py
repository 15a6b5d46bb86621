"""What the sidecar answers, as response models: the page of each rank, grouped by run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, Field

from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    IoEngineStatus,
    Page,
    PageReading,
    PathStatus,
    StepRecord,
    TierStatus,
)


class RankStatus(BaseModel):
    """One rank as its page shows it. Without a readable page everything below ``reason`` is empty."""

    rank: int
    state: Literal["live", "stale", "newer-version", "torn", "unreadable"]
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    reason: str = Field(description="why the state is not live; empty when it is")
    world_size: int | None = None
    pid: int | None = Field(default=None, description="in the rank's own pid namespace")
    started_at: float | None = Field(default=None, description="Unix time in seconds")
    step: int | None = None
    phase: str | None = None
    loss: float | Literal["NaN", "Infinity", "-Infinity"] | None = None
    configuration: ConfigurationStatus | None = Field(
        default=None, description="what the run was configured with"
    )
    tiers: list[TierStatus] = []
    activations: ActivationStatus | None = Field(default=None, description="what autograd keeps for backward")
    io: list[PathStatus] = []
    io_engine: IoEngineStatus | None = Field(default=None, description="absent where nothing is swapped")
    collectives: list[CollectiveStatus] = Field(default=[], description="empty where a rank is alone")
    stalls: dict[str, float] = Field(default={}, description="seconds that compute waited, by cause")
    steps: list[StepRecord] = Field(default=[], description="the most recent steps, oldest first")


class RunStatus(BaseModel):
    """All ranks of one run that this machine can see."""

    run_name: str
    ranks: list[RankStatus]


class Status(BaseModel):
    """Everything at a glance."""

    runs: list[RunStatus]


class Alive(BaseModel):
    """The sidecar itself answers."""

    status: Literal["ok"] = "ok"


def status_of(readings: Iterable[tuple[Page, PageReading]]) -> Status:
    """Group what the pages said by run, ranks in order; an unreadable page is filed under its file name."""
    runs: dict[str, list[RankStatus]] = {}
    for page, reading in readings:
        name = reading.snapshot.run_name if reading.snapshot else page.run_name
        runs.setdefault(name, []).append(_rank_status(page, reading))
    for ranks in runs.values():
        ranks.sort(key=lambda rank: (rank.rank, rank.started_at or 0.0))
    return Status(runs=[RunStatus(run_name=name, ranks=ranks) for name, ranks in sorted(runs.items())])


def _rank_status(page: Page, reading: PageReading) -> RankStatus:
    said = reading.snapshot
    if said is None:
        return RankStatus(
            rank=page.rank, state=reading.state, heartbeat_age=reading.heartbeat_age, reason=reading.reason
        )
    return RankStatus(
        rank=said.rank,
        state=reading.state,
        heartbeat_age=reading.heartbeat_age,
        reason=reading.reason,
        world_size=said.world_size,
        pid=said.pid,
        started_at=said.started_at,
        step=said.step,
        phase=said.phase,
        loss=_json_number(said.loss),
        configuration=said.configuration,
        tiers=said.tiers,
        activations=said.activations,
        io=said.io,
        io_engine=said.io_engine,
        collectives=said.collectives,
        stalls=said.stalls,
        steps=said.steps,
    )


def _json_number(value: float | None) -> float | Literal["NaN", "Infinity", "-Infinity"] | None:
    """JSON has no NaN, and a diverged loss must not look like a missing one."""
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
