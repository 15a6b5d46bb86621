"""``/v1/status`` and ``/v1/runs``: everything at a glance, and one run alone."""

from __future__ import annotations

from statistics import median
from typing import Any, Literal

from pydantic import BaseModel, Field

from service.advice import Advice, advise
from service.answers.numbers import Number
from service.view import RankView, RunView, State, View
from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    IoEngineStatus,
    PathStatus,
    StepRecord,
    TierStatus,
)


class RankStatus(BaseModel):
    """One rank as its page shows it. Without a readable page everything below ``reason`` is empty."""

    rank: int
    state: State
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    reason: str = Field(description="why the state is not live; empty when it is")
    node: str | None = None
    local_rank: int | None = None
    world_size: int | None = None
    pid: int | None = Field(default=None, description="in the rank's own pid namespace")
    started_at: float | None = Field(default=None, description="Unix time in seconds")
    step: int | None = None
    phase: str | None = None
    loss: Number | None = None
    samples: int | None = Field(default=None, description="of all ranks, in finished steps")
    skipped_steps: int | None = None
    gradient_norm: Number | None = None
    learning_rate: Number | None = None
    loss_scale: Number | None = None
    tiers: list[TierStatus] = []
    activations: ActivationStatus | None = Field(default=None, description="what autograd keeps for backward")
    io: list[PathStatus] = []
    io_engine: IoEngineStatus | None = Field(default=None, description="absent where nothing is swapped")
    collectives: list[CollectiveStatus] = Field(default=[], description="empty where a rank is alone")
    phase_seconds: dict[str, float] = Field(default={}, description="seconds since the start, by phase")
    stalls: dict[str, float] = Field(default={}, description="seconds that compute waited, by cause")
    steps: list[StepRecord] = Field(default=[], description="the most recent steps, oldest first")


class RunSummary(BaseModel):
    """A run in one line."""

    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str
    state: Literal["training", "degraded", "ended"] = Field(
        description="degraded: a rank that should be here is missing, silent or cannot be read"
    )
    world_size: int | None
    ranks_expected: int = Field(description="on this node")
    ranks_live: int = Field(description="on this node")
    started_at: float | None = Field(description="Unix time in seconds")
    step: int | None
    step_seconds: float | None = Field(description="the median of the recent steps of the slowest rank")
    stall_share: float | None = Field(
        description="of the recent steps, of the rank that stalled most; 0 to 1"
    )
    loss: Number | None
    warnings: list[Advice]


class RunStatus(RunSummary):
    """A run with all its ranks on this node."""

    device: str | None = Field(description="what rank 0, or the first rank here, computes on")
    configuration: str | None = Field(description="what the configuration comes to, in one line")
    versions: dict[str, str]
    ranks: list[RankStatus]


class Runs(BaseModel):
    """All runs of this node, in short."""

    runs: list[RunSummary]


class Status(BaseModel):
    """Everything at a glance."""

    taken_at: float = Field(description="Unix time at which the pages were read")
    runs: list[RunStatus]


def status(view: View) -> Status:
    return Status(taken_at=view.taken_at, runs=[run_status(run) for run in view.runs])


def runs(view: View) -> Runs:
    return Runs(runs=[RunSummary(**_summary(run)) for run in view.runs])


def run_status(run: RunView) -> RunStatus:
    said = next((rank.description for rank in run.ranks if rank.description is not None), None)
    configuration = None if said is None else said.configuration
    return RunStatus(
        **_summary(run),
        device=None if said is None else said.device,
        configuration=None if configuration is None else configuration.outcome,
        versions={} if said is None else said.versions,
        ranks=[rank_status(rank) for rank in run.ranks],
    )


def _summary(run: RunView) -> dict[str, Any]:
    live = sum(rank.fresh for rank in run.ranks)
    said = list(run.snapshots)
    recent = [one.steps for one in said if one.steps]
    return {
        "id": run.id,
        "name": run.name,
        "state": "ended" if run.over else "training" if live == run.expected else "degraded",
        "world_size": said[0].world_size if said else None,
        "ranks_expected": run.expected,
        "ranks_live": live,
        "started_at": min((one.started_at for one in said), default=None),
        "step": max((one.step for one in said), default=None),
        "step_seconds": max((median(step.seconds for step in steps) for steps in recent), default=None),
        "stall_share": max((_stalled(steps) for steps in recent), default=None),
        "loss": said[0].loss if said else None,
        "warnings": advise(run),
    }


def _stalled(steps: list[StepRecord]) -> float:
    return sum(step.stall for step in steps) / max(sum(step.seconds for step in steps), 1e-9)


def rank_status(rank: RankView) -> RankStatus:
    said = rank.snapshot
    seen: dict[str, Any] = {"state": rank.state, "heartbeat_age": rank.heartbeat_age, "reason": rank.reason}
    if said is None:
        return RankStatus(rank=rank.rank, **seen)
    told = {name: getattr(said, name) for name in RankStatus.model_fields if name not in seen}
    return RankStatus(**told, **seen)
