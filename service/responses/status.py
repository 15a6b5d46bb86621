"""``/v1/status`` and ``/v1/runs``: all runs, one run, and the runs that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from service.advice import Advice, advise, stragglers
from service.history import HistoryEntry
from service.progress import last_step_at
from service.run_end import How, end_of
from service.view import RankView, RunState, RunView, State, View
from tiering.telemetry import RECENT_STEPS, Diverging, Snapshot, figures

SCHEMA_VERSION = 1
# Of each rank in a status of several nodes: 512 ranks with all their steps would have 10 MB in each event.
STEPS_ON_ALL_NODES = 8


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
    tokens_per_second: float | None = Field(
        default=None, description="tokens of the rank per second of these steps; null if its inputs have none"
    )
    flops_per_second: float | None = Field(
        default=None,
        description="the model's floating-point operations for these tokens per second; null if unknown",
    )
    straggler: bool = Field(
        default=False,
        description="whether the rank is busy for 1.25 times as long as the others in recent steps: they wait for it",
    )


ELSEWHERE = ("stalls_by_phase", "curve")
"""Figures of a snapshot that a status does not have: they are in ``/v1/steps`` and ``/v1/curve``."""
IN_STATUS = {field: figure.help for field, figure in figures(Snapshot).items() if field not in ELSEWHERE}
"""The help texts of a snapshot's figures that a status has."""


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
    user: str = Field(default="", description="name of the user whose run it is")
    state: RunState = Field(
        description="degraded: a rank is missing, silent, unreadable, unreachable or cannot continue; stuck: the phase"
        " of a rank takes too long"
    )
    world_size: int | None = Field(description="number of ranks on all nodes")
    ranks_expected: int = Field(
        description="number of ranks on this node, as they report it; on all nodes with --of"
    )
    ranks_live: int = Field(description="number of these ranks with a fresh status file")
    started_at: float | None = Field(description="Unix time in seconds")
    step: int | None = Field(description="optimizer steps finished since the start")
    last_step_at: float | None = Field(
        default=None,
        description="Unix time at which the last step ended, on the rank where it is the earliest",
    )
    step_seconds: float | None = Field(description="step_seconds of the slowest rank")
    stall_share: float | None = Field(description="stall_share of the rank that stalled most")
    samples_per_second: float | None = Field(
        description="of all ranks: the samples of an average step, divided by step_seconds; 0 for a stuck run"
    )
    tokens_per_second: float | None = Field(
        default=None,
        description="of all ranks: the mean over those on this node, multiplied by world_size; 0 for a stuck run",
    )
    flops_per_second: float | None = Field(
        default=None,
        description="the model's floating-point operations per second of a device, the mean over the ranks on this"
        " node; 0 for a stuck run",
    )
    mfu: float | None = Field(
        default=None,
        description="model FLOPs utilisation, 0 to 1: flops_per_second divided by peak_flops of the data sheet",
    )
    checkpoint_at: float | None = Field(
        default=None,
        description="Unix time of the last checkpoint; null before the first, and if the last save failed",
    )
    loss: Diverging | None = Field(description="loss of the first rank on this node")
    warnings: list[Advice] = Field(description="problems of the run, errors first")


class RunStatus(RunSummary):
    """A run with all its ranks on this node."""

    device: str | None = Field(description="device of rank 0, or of the first rank on this node")
    configuration: str | None = Field(description="summary of the configuration in one line")
    versions: dict[str, str] = Field(description="versions of the software that the run uses, by name")
    labels: dict[str, str] = Field(
        description="job_id, job_name, namespace and pod as far as they are known, and tiering.telemetry.labels"
    )
    links: dict[str, str] = Field(
        default={},
        description="where other tools show the run, by name: URLs, or the directories that they read",
    )
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
        description="the last 30 runs that ended and have no status file any more, the latest first; a restart of the"
        " sidecar keeps them"
    )


class NodeStatus(BaseModel):
    """A node whose tierd is read."""

    address: str
    answers: bool = Field(
        description="if not, its ranks are shown as they were at answered_at, as unreachable"
    )
    problem: str = Field(description="why it does not answer; empty if it does")
    answered_at: float | None = Field(description="Unix time of its last answer; null before the first")
    ranks: int = Field(description="number of its ranks that are shown")


class Status(BaseModel):
    """All runs on this node, or on the nodes of `tierd --of`."""

    schema_version: int = Field(
        default=SCHEMA_VERSION,
        description="of all JSON of tierd; grows when a field changes or goes, not for a new one",
    )
    taken_at: float = Field(description="Unix time at which the status files were read")
    directory: str = Field(
        description="run directory, which has the status files; with --of, the nodes in words"
    )
    nodes: list[NodeStatus] = Field(default=[], description="the nodes of --of; empty without it")
    runs: list[RunStatus]


Latest = Callable[[str], HistoryEntry | None]


def no_entry(_: str) -> None:
    """The latest entry where no history is recorded."""


def status(view: View, latest: Latest = no_entry) -> Status:
    """``latest`` returns the newest history entry of a run id."""
    return Status(
        taken_at=view.taken_at,
        directory=view.directory,
        nodes=[
            NodeStatus(
                address=node.address,
                answers=not node.problem,
                problem=node.problem,
                answered_at=node.answered_at,
                ranks=node.ranks,
            )
            for node in view.nodes or ()
        ],
        runs=[run_status(run, latest) for run in view.runs],
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
        labels={} if description is None else description.labels,
        links={} if description is None else description.links,
        latest=None if run.over else latest(run.id),
        ranks=ranks,
    )


def _ranks(run: RunView) -> list[RankStatus]:
    waited_for = stragglers(run)
    steps = STEPS_ON_ALL_NODES if run.on_all_nodes else RECENT_STEPS
    return [rank_status(rank, straggler=rank.rank in waited_for, steps=steps) for rank in run.ranks]


def _summary(run: RunView, ranks: list[RankStatus]) -> dict[str, Any]:
    snapshots = list(run.snapshots)
    first = snapshots[0] if snapshots else None
    step_seconds = max((rank.step_seconds for rank in ranks if rank.step_seconds is not None), default=None)
    samples_per_second = None
    if run.state == "stuck":
        samples_per_second = 0.0
    elif first is not None and first.step > 0 and step_seconds:
        samples_per_second = first.samples / first.step / step_seconds
    tokens = _mean(rank.tokens_per_second for rank in ranks)
    flops = _mean(rank.flops_per_second for rank in ranks)
    if run.state == "stuck":
        tokens, flops = tokens and 0.0, flops and 0.0
    peak = None if first is None else first.peak_flops
    saves = [
        save.ended_at
        for snapshot in snapshots
        if (save := snapshot.checkpoint) is not None and not save.error
    ]
    return {
        "id": run.id,
        "name": run.name,
        "user": run.user,
        "state": run.state,
        "world_size": None if first is None else first.world_size,
        "ranks_expected": run.expected,
        "ranks_live": len(run.fresh),
        "started_at": min((snapshot.started_at for snapshot in snapshots), default=None),
        "step": max((snapshot.step for snapshot in snapshots), default=None),
        "last_step_at": min(filter(None, map(last_step_at, snapshots)), default=None),
        "step_seconds": step_seconds,
        "stall_share": max(
            (rank.stall_share for rank in ranks if rank.stall_share is not None), default=None
        ),
        "samples_per_second": samples_per_second,
        "tokens_per_second": None if tokens is None or first is None else tokens * first.world_size,
        "flops_per_second": flops,
        "mfu": flops / peak if flops is not None and peak else None,
        "checkpoint_at": min(filter(None, saves), default=None),
        "loss": None if first is None else first.loss,
        "warnings": advise(run),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rank_status(rank: RankView, *, straggler: bool = False, steps: int = RECENT_STEPS) -> RankStatus:
    """The status of a rank, with so many of its last steps."""
    snapshot = rank.snapshot
    fields: dict[str, Any] = {"state": rank.state, "heartbeat_age": rank.heartbeat_age, "reason": rank.reason}
    if snapshot is None:
        return RankStatus(rank=rank.rank, **fields)
    if (recent := rank.recent_steps) is not None:
        fields |= {
            "step_seconds": recent.seconds,
            "stall_share": recent.share,
            "stall_causes": recent.causes,
            "tokens_per_second": recent.tokens_per_second,
            "flops_per_second": recent.flops_per_second,
        }
    fields["straggler"] = straggler
    figures_of_rank = {name: getattr(snapshot, name) for name in IN_STATUS}
    figures_of_rank["steps"] = snapshot.steps[-steps:]
    return RankStatus(rank=rank.rank, **fields, **figures_of_rank)
