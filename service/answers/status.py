"""``/v1/status`` and ``/v1/runs``: everything at a glance, and one run alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainSerializer, WithJsonSchema

from service.advice import Advice, advise
from service.ends import How, end_of
from service.history import Entry
from service.recent import recent
from service.view import RankView, RunState, RunView, State, View
from tiering.telemetry import (
    ActivationStatus,
    CheckpointStatus,
    CollectiveStatus,
    DeviceMemoryStatus,
    IoEngineStatus,
    LinkStatus,
    PathStatus,
    StepRecord,
    TierStatus,
)


def _named(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# JSON has no NaN, and a diverged loss must not look like a missing one.
Number = Annotated[
    float,
    PlainSerializer(_named, return_type=float | str),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]


class RankStatus(BaseModel):
    """One rank as its page shows it. Without a readable page everything below ``reason`` is empty."""

    rank: int
    state: State
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    reason: str = Field(description="why the state is not live; empty when it is")
    node: str | None = Field(default=None, description="its host name")
    local_rank: int | None = Field(default=None, description="its place among the ranks of its node")
    world_size: int | None = Field(default=None, description="ranks of the run on all nodes")
    pid: int | None = Field(default=None, description="in the rank's own pid namespace")
    started_at: float | None = Field(default=None, description="Unix time in seconds")
    step: int | None = Field(default=None, description="optimizer steps finished since the start")
    global_step: int | None = Field(default=None, description="the same, going on from a checkpoint")
    phase: str | None = Field(default=None, description="start, forward, backward, step or idle")
    phase_since: float | None = Field(default=None, description="Unix time at which the phase began")
    broken: str | None = Field(default=None, description="why training cannot go on; empty while it can")
    loss: Number | None = Field(default=None, description="of the last step that told one; may be NaN")
    samples: int | None = Field(default=None, description="of all ranks, in finished steps")
    skipped_steps: int | None = Field(default=None, description="for gradients that were not finite")
    gradient_norm: Number | None = Field(default=None, description="before clipping")
    learning_rate: Number | None = Field(default=None, description="of the first parameter group")
    loss_scale: Number | None = Field(default=None, description="null where nothing is scaled")
    tiers: list[TierStatus] = Field(default=[], description="fastest first")
    activations: ActivationStatus | None = Field(default=None, description="what autograd keeps for backward")
    device_memory: DeviceMemoryStatus | None = Field(
        default=None, description="what torch has on the GPU; null where the device is the CPU"
    )
    io: list[PathStatus] = Field(default=[], description="each swap path in both directions")
    io_engine: IoEngineStatus | None = Field(default=None, description="absent where nothing is swapped")
    link: LinkStatus | None = Field(
        default=None,
        description="copies to the device (h2d) and from it (d2h); null where the device is the CPU",
    )
    collectives: list[CollectiveStatus] = Field(default=[], description="empty where a rank is alone")
    phase_seconds: dict[str, float] = Field(default={}, description="seconds since the start, by phase")
    stalls: dict[str, float] = Field(default={}, description="seconds that compute waited, by cause")
    steps: list[StepRecord] = Field(default=[], description="the most recent steps, oldest first")
    step_seconds: float | None = Field(
        default=None, description="the median of the recent steps, the first of the run left out"
    )
    stall_share: float | None = Field(
        default=None, description="of the time of the same steps, in which compute waited; 0 to 1"
    )
    stall_causes: dict[str, float] = Field(default={}, description="the same by cause, the largest first")
    checkpoint: CheckpointStatus | None = Field(default=None, description="null before the first save")


class RunSummary(BaseModel):
    """A run in one line."""

    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str = Field(description="as configured; several runs may have the same")
    state: RunState = Field(
        description="degraded: a rank that should be here is missing, silent, cannot be read or cannot go on"
    )
    world_size: int | None = Field(description="ranks on all nodes")
    ranks_expected: int = Field(description="ranks on this node, as they say themselves")
    ranks_live: int = Field(description="those of them with a fresh page")
    started_at: float | None = Field(description="Unix time in seconds")
    step: int | None = Field(description="optimizer steps finished since the start")
    step_seconds: float | None = Field(description="that of the slowest rank")
    stall_share: float | None = Field(description="that of the rank that stalled most")
    samples_per_second: float | None = Field(
        description="of all ranks: the samples of an average step, in step_seconds"
    )
    loss: Number | None = Field(description="of the first rank here")
    warnings: list[Advice] = Field(description="what deserves attention, the gravest first")


class RunStatus(RunSummary):
    """A run with all its ranks on this node."""

    device: str | None = Field(description="what rank 0, or the first rank here, computes on")
    configuration: str | None = Field(description="what the configuration comes to, in one line")
    versions: dict[str, str] = Field(description="of what it runs, by name")
    latest: Entry | None = Field(
        description="what /v1/history has of the last second; null before the first, and of a run that has ended"
    )
    ranks: list[RankStatus]


class EndedRun(RunSummary):
    """The last words of a run that has no page any more; its warnings are those of the moment before."""

    ended_at: float | None = Field(description="Unix time at which it was last heard")
    how: How = Field(
        description="finished; failed: by an error; preempted: a signal asked it to stop; died: it was killed;"
        " unknown: its pages were removed before they said it"
    )
    why: str = Field(
        description="of a failure the error and the rank that it began with; the signal; the ranks that died"
    )


class Runs(BaseModel):
    """All runs of this node, in short."""

    runs: list[RunSummary] = Field(description="those that have a page")
    ended: list[EndedRun] = Field(
        description="the last ten that have none any more, the latest first, as far as the sidecar was there to see"
    )


class Status(BaseModel):
    """Everything at a glance."""

    taken_at: float = Field(description="Unix time at which the pages were read")
    directory: str = Field(description="where the pages are")
    runs: list[RunStatus]


Latest = Callable[[str], Entry | None]


def nothing_yet(_: str) -> None:
    """The latest entry of a run that nobody watches."""


def status(view: View, latest: Latest = nothing_yet) -> Status:
    """``latest`` gives the newest entry of the history of a run by its id."""
    return Status(
        taken_at=view.taken_at, directory=view.directory, runs=[run_status(run, latest) for run in view.runs]
    )


def only(told: Status, run: str | None) -> Status:
    """The status without other runs."""
    if run is None:
        return told
    return told.model_copy(update={"runs": [one for one in told.runs if one.id == run]})


def runs(told: Status, ended: Iterable[EndedRun] = ()) -> Runs:
    """The same in short, and the runs that ended before."""
    fields = RunSummary.model_fields
    return Runs(
        runs=[RunSummary(**{name: getattr(one, name) for name in fields}) for one in told.runs],
        ended=list(ended),
    )


def last_words(run: RunView) -> EndedRun:
    """Of a run as it was last seen."""
    said = _summary(run, _ranks(run)) | {"state": "ended", "ranks_live": 0}
    heard = [rank.published_at for rank in run.ranks if rank.published_at is not None]
    end = end_of(run)
    return EndedRun(**said, ended_at=max(heard, default=None), how=end.how, why=end.why)


def run_status(run: RunView, latest: Latest = nothing_yet) -> RunStatus:
    said = next((rank.description for rank in run.ranks if rank.description is not None), None)
    configuration = None if said is None else said.configuration
    ranks = _ranks(run)
    return RunStatus(
        **_summary(run, ranks),
        device=None if said is None else said.device,
        configuration=None if configuration is None else configuration.outcome,
        versions={} if said is None else said.versions,
        latest=None if run.over else latest(run.id),
        ranks=ranks,
    )


def _ranks(run: RunView) -> list[RankStatus]:
    return [rank_status(rank) for rank in run.ranks]


def _summary(run: RunView, ranks: list[RankStatus]) -> dict[str, Any]:
    said = list(run.snapshots)
    took = max((rank.step_seconds for rank in ranks if rank.step_seconds is not None), default=None)
    return {
        "id": run.id,
        "name": run.name,
        "state": run.state,
        "world_size": said[0].world_size if said else None,
        "ranks_expected": run.expected,
        "ranks_live": len(run.fresh),
        "started_at": min((one.started_at for one in said), default=None),
        "step": max((one.step for one in said), default=None),
        "step_seconds": took,
        "stall_share": max((one.stall_share for one in ranks if one.stall_share is not None), default=None),
        "samples_per_second": said[0].samples / said[0].step / took if took and said[0].step > 0 else None,
        "loss": said[0].loss if said else None,
        "warnings": advise(run),
    }


def rank_status(rank: RankView) -> RankStatus:
    said = rank.snapshot
    seen: dict[str, Any] = {"state": rank.state, "heartbeat_age": rank.heartbeat_age, "reason": rank.reason}
    if said is None:
        return RankStatus(rank=rank.rank, **seen)
    if (found := recent(said)) is not None:
        seen |= {"step_seconds": found.seconds, "stall_share": found.share, "stall_causes": found.causes}
    told = {
        name: getattr(said, name)
        for name in RankStatus.model_fields
        if name not in seen and hasattr(said, name)
    }
    return RankStatus(**told, **seen)
