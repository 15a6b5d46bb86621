"""``/v1/status`` and ``/v1/runs``: everything at a glance, and one run alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from service.advice import Advice, advise
from service.history import Entry
from service.recent_steps import recent
from service.run_end import How, end_of
from service.view import RankView, RunState, RunView, State, View
from tiering.telemetry import Diverging, Snapshot, figures


class RankSeen(BaseModel):
    """What the sidecar finds out about a rank, beside what its page says."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    rank: int
    state: State
    heartbeat_age: float | None = Field(description="seconds since the rank last published")
    reason: str = Field(description="why the state is not live; empty when it is")
    step_seconds: float | None = Field(
        default=None, description="the median of the recent steps, the first of the run left out"
    )
    stall_share: float | None = Field(
        default=None, description="of the time of the same steps, in which compute waited; 0 to 1"
    )
    stall_causes: dict[str, float] = Field(default={}, description="the same by cause, the largest first")


IN_STATUS = {field: figure.help for field, figure in figures(Snapshot).items() if field != "stalls_by_phase"}
"""The figures of a snapshot that a status has, and what they are. Stalls by phase are in ``/v1/steps``."""


def _in_status() -> Iterator[tuple[str, Any]]:
    """Those as fields of a model: empty where there is no readable page."""
    hints = get_type_hints(Snapshot, include_extras=True)
    for field in fields(Snapshot):
        if field.name in IN_STATUS:
            kind = hints[field.name].__origin__  # without the Figure
            empty = None if field.default_factory is MISSING else field.default_factory()
            nullable = kind | None if empty is None else kind
            yield field.name, (nullable, Field(default=empty, description=IN_STATUS[field.name]))


if TYPE_CHECKING:

    class RankStatus(RankSeen):
        def __getattr__(self, figure: str) -> Any: ...

else:
    RankStatus = create_model(
        "RankStatus",
        __base__=RankSeen,
        __module__=__name__,
        __doc__="One rank as its page shows it. Figures are empty without a readable page.",
        **dict(_in_status()),
    )


class RunSummary(BaseModel):
    """A run in one line."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

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
    loss: Diverging | None = Field(description="that of the first rank here")
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
    return RankStatus(rank=rank.rank, **seen, **{name: getattr(said, name) for name in IN_STATUS})
