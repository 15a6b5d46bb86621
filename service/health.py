"""Liveness of the sidecar and readiness of the ranks, with the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from service.formatting import counted
from service.view import RankView, RunView, View
from tiering._version import __version__
from tiering.telemetry import as_text


class Alive(BaseModel):
    """The sidecar answers."""

    status: str = Field(default="ok", description="always ok: a sidecar that is not alive does not answer")


class Readiness(BaseModel):
    """Whether every rank that should be on this node publishes."""

    ready: bool
    reasons: list[str] = Field(description="the reasons if not ready; else empty")


class Health(Readiness):
    """Readiness, and the state of the sidecar."""

    version: str
    started_at: float = Field(description="Unix time in seconds")
    uptime: float = Field(description="seconds")
    directory: str = Field(
        description="run directory, which has the status files of the ranks; with --of, the nodes in words"
    )
    directory_problem: str | None = Field(description="why the run directory cannot be read; null if it can")
    last_reading_at: float | None = Field(description="Unix time at which the status files were last read")
    readings: int = Field(description="number of readings of the status files so far")
    subscribers: int = Field(description="number of clients connected to /v1/events")


def ready(view: View, expect_ranks: int | None = None) -> Readiness:
    """Ready: a run is active, and every rank on this node of each active run has a fresh status file.

    With ``expect``: and so many ranks publish on this node; 0 is content without any run.
    """
    problems = [
        f"node {node.address} does not answer: {node.problem}" for node in view.nodes or () if node.problem
    ]
    problems += [f"run {run.name}: {reason}" for run in view.runs if not run.over for reason in reasons(run)]
    fresh = sum(len(run.fresh) for run in view.runs)
    where = "on this node" if view.nodes is None else "on all nodes"
    if expect_ranks is not None and fresh < expect_ranks:
        verb = "publishes" if fresh == 1 else "publish"
        problems.append(f"{fresh} of the {counted(expect_ranks, 'rank')} expected {where} {verb}")
    if expect_ranks is None and all(run.over for run in view.runs):
        problems.append("every run here has ended" if view.runs else "no run publishes here yet")
    return Readiness(ready=not problems, reasons=problems)


def reasons(run: RunView) -> Iterator[str]:
    """Why the run is degraded, without the errors that the ranks report themselves."""
    covered = set(run.fresh)
    unreachable = Counter[str]()
    for rank in reversed(run.ranks):  # of two status files of one rank, the later one counts
        if rank.rank not in covered:
            covered.add(rank.rank)
            if rank.state == "unreachable":
                unreachable[rank.reason] += 1
                continue
            yield f"rank {rank.rank} {_problem(rank)}"
    for reason, count in unreachable.items():
        yield f"{counted(count, 'rank')} cannot be seen: {reason}"
    if run.missing:
        verb = "has" if run.missing == 1 else "have"
        yield f"{run.missing} of its {counted(run.expected, 'rank')} {run.where} {verb} no status file"


def _problem(rank: RankView) -> str:
    if rank.state == "silent":
        return f"has not published for {rank.heartbeat_age:.0f} s"
    if rank.state == "live":
        return "has not published yet"
    if rank.state == "stale":
        return rank.reason if rank.ended is not None else f"is stale: {rank.reason}"
    return f"has a status file that cannot be read: {rank.reason}"


@dataclass
class Identity:
    """The sidecar itself: its run directory, the expected ranks, and its start."""

    directory: str
    expect_ranks: int | None = None
    started_at: float = field(default_factory=time.time)
    _started: float = field(default_factory=time.monotonic)  # a clock that nobody sets

    def health(self, view: View | None, problem: str | None, subscribers: int) -> Health:
        """The current health. ``view`` is the last View, and ``problem`` is why the last reading failed, if it did."""
        readiness = ready(view, self.expect_ranks) if view is not None else Readiness(ready=False, reasons=[])
        problems = readiness.reasons if problem is None else [problem]
        return Health(
            ready=not problems,
            reasons=problems,
            version=__version__,
            started_at=self.started_at,
            uptime=time.monotonic() - self._started,
            directory=as_text(self.directory),
            directory_problem=problem,
            last_reading_at=None if view is None else view.taken_at,
            readings=0 if view is None else view.readings,
            subscribers=subscribers,
        )
