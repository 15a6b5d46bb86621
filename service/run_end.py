"""How a run ended, from the last status of its ranks. The log, /v1/runs, the web page and the terminal show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from service.health import reasons
from service.view import RankView, RunView, View

How = Literal["finished", "failed", "preempted", "died", "unknown"]
_VERBS: dict[How, str] = {
    "finished": "has finished",
    "failed": "has failed",
    "preempted": "has been stopped",
    "died": "has died",
    "unknown": "has ended",
}


@dataclass(frozen=True)
class RunEnd:
    """``how`` a run ended, and ``why``: the error, the signal, or the ranks that were killed.

    ``code`` is that of the error or the signal, and ``rank`` the rank in which the error started.

    died     a rank was killed: its process is gone, and its status file does not report how it ended
    unknown  the status files were removed before they reported how
    """

    how: How
    why: str = ""
    code: str = ""
    rank: int | None = None

    def sentence(self, after: str = "") -> str:
        """The end as a predicate, with ``after`` behind the verb: "has failed at step 3: TIER-IO: ..."."""
        return f"{_VERBS[self.how]}{after}" + (f": {self.why}" if self.why else "")


def end_of(run: RunView) -> RunEnd:
    """A failure takes precedence; of several failures, that of the rank in which the error started."""
    ends = [(rank.rank, rank.ended) for rank in run.ranks if rank.ended is not None]
    failures = [(end.rank != rank, rank, end) for rank, end in ends if end.how == "failed"]
    if failures:
        *_, end = min(failures, key=lambda failure: failure[:2])
        return RunEnd("failed", f"rank {end.rank}: {end.reason}", end.code, end.rank)
    if any(rank.state == "stale" and rank.ended is None for rank in run.ranks):
        return RunEnd("died", "; ".join(reasons(run)))
    # A preempted rank takes precedence over a finished one.
    for _, end in sorted(ends, key=lambda rank_end: rank_end[1].how == "finished"):
        return RunEnd(end.how, end.reason, end.code)
    return RunEnd("unknown", "its status files were removed before they reported how")


def with_last_status(run: RunView, closed: Iterable[RunView]) -> RunView:
    """``run``, with the status that ranks left in closed status files in place of the earlier one."""
    ranks: dict[int, RankView] = {rank.rank: rank for rank in run.ranks}
    for closed_run in closed:
        if closed_run.id == run.id:
            ranks |= {rank.rank: rank for rank in closed_run.ranks}
    return replace(run, ranks=tuple(ranks[number] for number in sorted(ranks)))


def ended(view: View) -> Iterator[RunView]:
    """The runs whose ranks on this node have all ended and still have status files, with their last status."""
    yield from (with_last_status(run, view.closed) for run in view.runs if run.over)
    yield from (run for run in view.closed if view.run(run.id) is None)
