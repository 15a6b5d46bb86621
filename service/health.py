"""Whether the sidecar answers, whether every rank that should publish does, and both with reasons."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import BaseModel, Field

from service.formatting import counted
from service.version import own_version
from service.view import RankView, RunView, View
from tiering.telemetry import as_text


class Alive(BaseModel):
    """The sidecar itself answers."""

    status: str = Field(default="ok", description="always ok: what does not answer is not alive")


class Readiness(BaseModel):
    """Whether every rank that should be on this node publishes."""

    ready: bool
    reasons: list[str] = Field(description="why not, in words; empty when ready")


class Health(Readiness):
    """Readiness, and the sidecar's own state."""

    version: str
    started_at: float = Field(description="Unix time in seconds")
    uptime: float = Field(description="seconds")
    directory: str = Field(description="where the pages are")
    directory_problem: str | None = Field(description="why the pages cannot be read; null while they can")
    last_reading_at: float | None = Field(description="Unix time at which the pages were last read")
    readings: int = Field(description="how often the pages were read so far")
    subscribers: int = Field(description="who listens to /v1/events")


def ready(view: View, expect: int | None = None) -> Readiness:
    """Ready: every rank here of every run that is not over has a fresh page, and there is such a run.

    With ``expect``: and so many ranks publish on this node; 0 is content without any run.
    """
    why = [f"run {run.name}: {reason}" for run in view.runs if not run.over for reason in reasons(run)]
    fresh = sum(len(run.fresh) for run in view.runs)
    if expect is not None and fresh < expect:
        verb = "publishes" if fresh == 1 else "publish"
        why.append(f"{fresh} of the {counted(expect, 'rank')} expected on this node {verb}")
    if expect is None and all(run.over for run in view.runs):
        why.append("every run here has ended" if view.runs else "no run publishes here yet")
    return Readiness(ready=not why, reasons=why)


def reasons(run: RunView) -> Iterator[str]:
    """Why the run is degraded, but for what its ranks say themselves."""
    shown = set(run.fresh)
    for rank in reversed(run.ranks):  # of two pages of one rank the later one says how it is
        if rank.rank not in shown:
            shown.add(rank.rank)
            yield f"rank {rank.rank} {_wrong(rank)}"
    if run.missing:
        verb = "has" if run.missing == 1 else "have"
        yield f"{run.missing} of its {counted(run.expected, 'rank')} on this node {verb} no page here"


def _wrong(rank: RankView) -> str:
    if rank.state == "silent":
        return f"has not published for {rank.heartbeat_age:.0f} s"
    if rank.state == "live":
        return "has not published yet"
    if rank.state == "stale":
        return rank.reason if rank.ended is not None else f"is stale: {rank.reason}"
    return f"has a page that cannot be read: {rank.reason}"


@dataclass
class Identity:
    """Which sidecar this is: what it reads, what it expects there, and since when."""

    directory: str
    expect: int | None = None
    started_at: float = field(default_factory=time.time)
    _began: float = field(default_factory=time.monotonic)  # a clock that nobody sets

    def health(self, view: View | None, problem: str | None, subscribers: int) -> Health:
        """Of now; ``view`` is the last one there was, and ``problem`` why there is none newer."""
        readiness = ready(view, self.expect) if view is not None else Readiness(ready=False, reasons=[])
        why = readiness.reasons if problem is None else [problem]
        return Health(
            ready=not why,
            reasons=why,
            version=own_version(),
            started_at=self.started_at,
            uptime=time.monotonic() - self._began,
            directory=as_text(self.directory),
            directory_problem=problem,
            last_reading_at=None if view is None else view.taken_at,
            readings=0 if view is None else view.readings,
            subscribers=subscribers,
        )
