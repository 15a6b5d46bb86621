"""``/v1/status`` and ``/v1/runs``: all runs, one run, and the runs that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from service.advice import Advice, advise
from service.history import HistoryEntry
from service.recent_steps import recent_steps
from service.run_end import How, end_of
from service.view import RankView, RunState, RunView, State, View
from tiering.telemetry import Diverging, Snapshot, figures


class RankObservation(BaseModel):
    """What the sidecar determines about a rank. The other figures come from the rank's status file."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    rank: int
    state: State
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    reason: str = Field(description="why the state is not live; empty if it is")
    step_seconds: float | None = Field(
        default=None, description="median of the recent steps, without the first of the run"
    )
    stall_share: float | None = Field(
        default=None, description="share of the time of these steps in which compute waited, 0 to 1"
    )
    stall_causes: dict[str, float] = Field(default={}, description="this share by cause, the largest first")


IN_STATUS = {field: figure.help for field, figure in figures(Snapshot).items() if field != "stalls_by_phase"}
"""The help texts of a snapshot's figures that a status has. Stalls by phase are in ``/v1/steps``."""


def _in_status() -> Iterator[tuple[str, Any]]:
    """These figures as model fields. Their defaults are for a rank without a readable status file."""
    hints = get_type_hints(Snapshot, include_extras=True)
    for field in fields(Snapshot):
        if field.name in IN_STATUS:
            kind = hints[field.name].__origin__  # without the Figure
            empty = None if field.default_factory is MISSING else field.default_factory()
            nullable = kind | None if empty is None else kind
            yield field.name, (nullable, Field(default=empty, description=IN_STATUS[field.name]))


if TYPE_CHECKING:

    class RankStatus(RankObservation):
        def __getattr__(self, figure: str) -> Any: ...

else:
    RankStatus = create_model(
        "RankStatus",
        __base__=RankObservation,
        __module__=__name__,
        __doc__="One rank as its status file shows it. Figures are null or empty without a readable status file.",
        **dict(_in_status()),
    )


class RunSummary(BaseModel):
    """A summary of a run."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    id: str = Field(description="the same on all ranks of one start, unique among starts")
    name: str = Field(description="as configured; several runs may have the same name")
    state: RunState = Field(
        description="degraded: a rank of this node is missing, silent, unreadable or cannot continue"
    )
    world_size: int | None = Field(description="number of ranks on all nodes")
    ranks_expected: int = Field(description="number of ranks on this node, as they report it")
    ranks_live: int = Field(description="number of ranks on this node with a fresh status file")
    started_at: float | None = Field(description="Unix time in seconds")
    step: int | None = Field(description="optimizer steps finished since the start")
    step_seconds: float | None = Field(description="step_seconds of the slowest rank")
    stall_share: float | None = Field(description="stall_share of the rank that stalled most")
    samples_per_second: float | None = Field(
        description="of all ranks: the samples of an average step, divided by step_seconds"
    )
    loss: Diverging | None = Field(description="loss of the first rank on this node")
    warnings: list[Advice] = Field(description="problems of the run, errors first")


class RunStatus(RunSummary):
    """A run with all its ranks on this node."""

    device: str | None = Field(description="device of rank 0, or of the first rank on this node")
    configuration: str | None = Field(description="summary of the configuration in one line")
    versions: dict[str, str] = Field(description="versions of the software that the run uses, by name")
    latest: HistoryEntry | None = Field(
        description="the latest entry of /v1/history; null before the first entry, and for a run that has ended"
    )
    ranks: list[RankStatus]


class EndedRun(RunSummary):
    """The last summary of a run that has no status file any more; its warnings are those before its end."""

    ended_at: float | None = Field(description="Unix time at which a rank last published")
    how: How = Field(
        description="finished; failed: by an error; preempted: stopped by a signal; died: killed;"
        " unknown: its status files were removed before they reported how"
    )
    why: str = Field(
        description="failed: the error and the rank where it started; preempted: the signal; died: the ranks that died"
    )


class Runs(BaseModel):
    """A summary of each run on this node."""

    runs: list[RunSummary] = Field(description="runs that have a status file")
    ended: list[EndedRun] = Field(
        description="the last ten runs that ended while the sidecar was running and have no status file any more,"
        " the latest first"
    )


class Status(BaseModel):
    """All runs on this node."""

    taken_at: float = Field(description="Unix time at which the status files were read")
    directory: str = Field(description="run directory, which has the status files")
    runs: list[RunStatus]


Latest = Callable[[str], HistoryEntry | None]


def no_entry(_: str) -> None:
    """The latest entry where no history is recorded."""


def status(view: View, latest: Latest = no_entry) -> Status:
    """``latest`` returns the newest history entry of a run id."""
    return Status(
        taken_at=view.taken_at, directory=view.directory, runs=[run_status(run, latest) for run in view.runs]
    )


def only(status: Status, run: str | None) -> Status:
    """The status with the run of this id alone; with all runs for None."""
    if run is None:
        return status
    return status.model_copy(update={"runs": [candidate for candidate in status.runs if candidate.id == run]})


def runs(status: Status, ended: Iterable[EndedRun] = ()) -> Runs:
    """The summaries in ``status``, and the runs that ended before."""
    fields = RunSummary.model_fields
    return Runs(
        runs=[RunSummary(**{name: getattr(run, name) for name in fields}) for run in status.runs],
        ended=list(ended),
    )


def ended_run(run: RunView) -> EndedRun:
    """The summary of a run that ended; ``run`` has the last status of its ranks."""
    summary = _summary(run, _ranks(run)) | {"state": "ended", "ranks_live": 0}
    published = [rank.published_at for rank in run.ranks if rank.published_at is not None]
    end = end_of(run)
    return EndedRun(**summary, ended_at=max(published, default=None), how=end.how, why=end.why)


def run_status(run: RunView, latest: Latest = no_entry) -> RunStatus:
    description = next((rank.description for rank in run.ranks if rank.description is not None), None)
    configuration = None if description is None else description.configuration
    ranks = _ranks(run)
    return RunStatus(
        **_summary(run, ranks),
        device=None if description is None else description.device,
        configuration=None if configuration is None else configuration.outcome,
        versions={} if description is None else description.versions,
        latest=None if run.over else latest(run.id),
        ranks=ranks,
    )


def _ranks(run: RunView) -> list[RankStatus]:
    return [rank_status(rank) for rank in run.ranks]


def _summary(run: RunView, ranks: list[RankStatus]) -> dict[str, Any]:
    snapshots = list(run.snapshots)
    first = snapshots[0] if snapshots else None
    step_seconds = max((rank.step_seconds for rank in ranks if rank.step_seconds is not None), default=None)
    samples_per_second = None
    if first is not None and first.step > 0 and step_seconds:
        samples_per_second = first.samples / first.step / step_seconds
    return {
        "id": run.id,
        "name": run.name,
        "state": run.state,
        "world_size": None if first is None else first.world_size,
        "ranks_expected": run.expected,
        "ranks_live": len(run.fresh),
        "started_at": min((snapshot.started_at for snapshot in snapshots), default=None),
        "step": max((snapshot.step for snapshot in snapshots), default=None),
        "step_seconds": step_seconds,
        "stall_share": max(
            (rank.stall_share for rank in ranks if rank.stall_share is not None), default=None
        ),
        "samples_per_second": samples_per_second,
        "loss": None if first is None else first.loss,
        "warnings": advise(run),
    }


def rank_status(rank: RankView) -> RankStatus:
    snapshot = rank.snapshot
    fields: dict[str, Any] = {"state": rank.state, "heartbeat_age": rank.heartbeat_age, "reason": rank.reason}
    if snapshot is None:
        return RankStatus(rank=rank.rank, **fields)
    if (steps := recent_steps(snapshot)) is not None:
        fields |= {"step_seconds": steps.seconds, "stall_share": steps.share, "stall_causes": steps.causes}
    return RankStatus(rank=rank.rank, **fields, **{name: getattr(snapshot, name) for name in IN_STATUS})
