"""What all pages of a run directory said at one moment, by run and rank. Pure data; everything served is made of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tiering.telemetry import Description, EndStatus, Snapshot, StatusFile, StatusReading

FRESH_SECONDS = 10.0  # ranks publish four times a second: one that has not for so long is held up

State = Literal["live", "silent", "stale", "newer-version", "torn", "unreadable"]
RunState = Literal["training", "degraded", "ended"]


class NotHereError(LookupError):
    """What a filter names is not on this node. Says what to do."""


@dataclass(frozen=True)
class RankView:
    """One rank as its page shows it; ``snapshot`` is None where nothing can be read.

    "silent" is a rank that lives and has not published for FRESH_SECONDS: stopped, or starved. The other states are
    those of a StatusReading, and so are ``heartbeat_age``, ``published_at`` and ``reason``.
    """

    rank: int
    state: State
    reason: str
    heartbeat_age: float | None
    snapshot: Snapshot | None = None
    description: Description | None = None
    published_at: float | None = None

    @property
    def ended(self) -> EndStatus | None:
        """How its run ended, as the rank said last; None while it lives, and where it was killed."""
        return None if self.snapshot is None or self.state != "stale" else self.snapshot.ended

    @property
    def ended_well(self) -> bool:
        """Whether it has finished, or stopped as it was asked."""
        return self.ended is not None and self.ended.how != "failed"

    @property
    def fresh(self) -> bool:
        """Whether what it says is of now."""
        return self.state == "live" and self.snapshot is not None


@dataclass(frozen=True)
class RunView:
    """All ranks of one start of a training script that this node can see, in order."""

    id: str
    name: str
    ranks: tuple[RankView, ...]

    @property
    def snapshots(self) -> Iterator[Snapshot]:
        """Of the ranks that said anything, in order."""
        return (rank.snapshot for rank in self.ranks if rank.snapshot is not None)

    @cached_property
    def expected(self) -> int:
        """How many ranks of the run are on this node: what they say themselves, and no fewer than were seen."""
        said = max((said.local_world_size for said in self.snapshots), default=0)
        return max(said, len({rank.rank for rank in self.ranks}))

    @property
    def fresh(self) -> set[int]:
        """Ranks with a fresh page; others of the same rank are left by a start that died."""
        return {rank.rank for rank in self.ranks if rank.fresh}

    @property
    def missing(self) -> int:
        """How many of those expected have no page here."""
        return self.expected - len({rank.rank for rank in self.ranks})

    @property
    def over(self) -> bool:
        """Whether none of its ranks runs any more."""
        return all(rank.state == "stale" for rank in self.ranks)

    @property
    def state(self) -> RunState:
        """Degraded is a run of which a rank that should be here is missing, silent, unreadable or cannot go on."""
        if self.over:
            return "ended"
        whole = len(self.fresh) == self.expected and not any(said.broken for said in self.snapshots)
        return "training" if whole else "degraded"


@dataclass(frozen=True)
class View:
    """``taken_at`` is Unix time; runs are in the order of their names, and then of their start.

    ``readings`` counts the readings of ``directory`` up to this one, and ``changes`` those that found something new.
    ``left`` are pages of ranks that have finished, or stopped as they were asked: they are in no run any more.
    """

    taken_at: float
    runs: tuple[RunView, ...]
    directory: str = ""
    readings: int = 0
    changes: int = 0
    left: tuple[RunView, ...] = ()

    def run(self, run_id: str) -> RunView | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def select(self, run: str | None = None, rank: int | None = None) -> Sequence[RunView]:
        """Runs with the ranks that the filters leave. Raises NotHereError where that is nothing at all."""
        runs = self.runs
        if run is not None:
            runs = tuple(one for one in runs if one.id == run)
            if not runs:
                raise NotHereError(self._instead(run))
        if rank is None:
            return runs
        left = tuple(replace(one, ranks=tuple(it for it in one.ranks if it.rank == rank)) for one in runs)
        if not any(one.ranks for one in left):
            raise NotHereError(f"rank {rank} has no page on this node; /v1/status lists those that have")
        return left

    def _instead(self, asked: str) -> str:
        named = [run.id for run in self.runs if run.name == asked]
        if named:
            return f"that is the name of a run; ask for it by its id: {', '.join(named[-3:])}"
        return "no run of this id has a page on this node; /v1/runs lists those that have"

    def tells_more_than(self, other: View) -> bool:
        """Whether somebody published since ``other``, or a page came, went or changed its state."""
        pages = [(run.id, rank) for run in self.runs for rank in run.ranks]
        before = [(run.id, rank) for run in other.runs for rank in run.ranks]
        return len(pages) != len(before) or any(
            run != run_before or _news(rank, rank_before)
            for (run, rank), (run_before, rank_before) in zip(pages, before, strict=True)
        )


def _news(now: RankView, before: RankView) -> bool:
    return (now.rank, now.state, now.reason, now.published_at) != (
        before.rank,
        before.state,
        before.reason,
        before.published_at,
    )


def view_of(
    readings: Iterable[tuple[StatusFile, StatusReading]],
    taken_at: float | None = None,
    *,
    fresh_seconds: float = FRESH_SECONDS,
) -> View:
    """Group what the pages said by run. A page that cannot be read is filed under the run that its name tells."""
    found = list(readings)
    ids = {
        page.run_name: said.run_id for page, reading in found if (said := reading.snapshot) and said.run_id
    }
    ranks: dict[str, list[RankView]] = {}
    left: dict[str, list[RankView]] = {}
    for page, reading in found:
        said = reading.snapshot
        run_id = (said.run_id if said is not None else ids.get(page.run_name, "")) or page.run_name
        rank = _rank(page, reading, fresh_seconds)
        (left if rank.ended_well else ranks).setdefault(run_id, []).append(rank)
    runs = [_run(run_id, these) for run_id, these in ranks.items()]
    runs.sort(
        key=lambda run: (run.name, min((said.started_at for said in run.snapshots), default=0.0), run.id)
    )
    return View(
        time.time() if taken_at is None else taken_at,
        tuple(runs),
        left=tuple(_run(run_id, these) for run_id, these in left.items()),
    )


def _run(run_id: str, ranks: list[RankView]) -> RunView:
    in_order = sorted(ranks, key=lambda rank: (rank.rank, rank.snapshot.started_at if rank.snapshot else 0.0))
    name = next((rank.snapshot.run_name for rank in in_order if rank.snapshot is not None), run_id)
    return RunView(run_id, name, tuple(in_order))


def _rank(page: StatusFile, reading: StatusReading, fresh_seconds: float) -> RankView:
    state: State = reading.state
    reason, age, said = reading.reason, reading.heartbeat_age, reading.snapshot
    if state == "live" and age is not None and age > fresh_seconds:
        state, reason = "silent", f"alive, but has not published for {age:.0f} s: is it stopped?"
    elif state == "live" and said is None:
        reason = "has not published yet"
    rank = page.rank if said is None else said.rank
    return RankView(rank, state, reason, age, said, reading.description, reading.published_at)
