"""How a run ended, of what its ranks said last: one answer for the log, /v1/runs, the page and the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from service.health import reasons
from service.view import RankView, RunView

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

    died     a rank was killed: its process is gone, and its page does not say how it ended
    unknown  the pages were removed before they said it
    """

    how: How
    why: str = ""

    def words(self, after: str = "") -> str:
        """It in a sentence about the run, with ``after`` behind the verb: "has failed at step 3: TIER-IO: ..."."""
        return f"{_VERBS[self.how]}{after}" + (f": {self.why}" if self.why else "")


def end_of(run: RunView) -> RunEnd:
    """An error counts most, and of several that of the rank which the failure began with."""
    said = [(rank.rank, rank.ended) for rank in run.ranks if rank.ended is not None]
    failed = [(end.rank != rank, rank, end) for rank, end in said if end.how == "failed"]
    if failed:
        *_, end = min(failed, key=lambda one: one[:2])
        return RunEnd("failed", f"rank {end.rank}: {end.reason}")
    if any(rank.state == "stale" and rank.ended is None for rank in run.ranks):
        return RunEnd("died", "; ".join(reasons(run)))
    for _, end in sorted(said, key=lambda one: one[1].how == "finished"):  # one that was stopped counts more
        return RunEnd(end.how, end.reason)
    return RunEnd("unknown", "its pages were removed before they said how")


def with_last_pages(run: RunView, left: Iterable[RunView]) -> RunView:
    """``run`` as it was last seen, with the last pages of those ranks that left one."""
    ranks: dict[int, RankView] = {rank.rank: rank for rank in run.ranks}
    for other in left:
        if other.id == run.id:
            ranks |= {rank.rank: rank for rank in other.ranks}
    return RunView(run.id, run.name, tuple(ranks[number] for number in sorted(ranks)))
