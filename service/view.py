"""What all pages of a run directory said at one moment, by run and rank. Pure data; everything served is made of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tiering.telemetry import Description, Page, PageReading, Snapshot

FRESH_SECONDS = 10.0  # ranks publish four times a second; what holds them up for so long is worth a word

State = Literal["live", "silent", "stale", "newer-version", "torn", "unreadable"]


@dataclass(frozen=True)
class RankView:
    """One rank as its page shows it; ``snapshot`` is None where nothing can be read.

    "silent" is a rank that lives and has not published for FRESH_SECONDS: stopped, or starved. The other states are
    those of a PageReading, and so are ``heartbeat_age`` and ``reason``.
    """

    rank: int
    state: State
    reason: str
    heartbeat_age: float | None
    snapshot: Snapshot | None = None
    description: Description | None = None

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
        """How many ranks of the run are on this node, as they say themselves; those seen where none says it."""
        return max((said.local_world_size for said in self.snapshots), default=len(self.ranks))

    @property
    def missing(self) -> int:
        """How many of those have no page here."""
        return max(0, self.expected - len(self.ranks))

    @property
    def over(self) -> bool:
        """Whether none of its ranks runs any more."""
        return all(rank.state == "stale" for rank in self.ranks)


@dataclass(frozen=True)
class View:
    """``taken_at`` is Unix time; runs are in the order of their names, and then of their start."""

    taken_at: float
    runs: tuple[RunView, ...]

    def run(self, run_id: str) -> RunView | None:
        return next((run for run in self.runs if run.id == run_id), None)


def view_of(readings: Iterable[tuple[Page, PageReading]], taken_at: float | None = None) -> View:
    """Group what the pages said by run. A page that cannot be read is filed under the run that its name tells."""
    ranks: dict[str, list[RankView]] = {}
    for page, reading in readings:
        said = reading.snapshot
        run_id = said.run_id if said is not None and said.run_id else page.run_name
        ranks.setdefault(run_id, []).append(_rank(page, reading))
    runs = [_run(run_id, found) for run_id, found in ranks.items()]
    runs.sort(
        key=lambda run: (run.name, min((said.started_at for said in run.snapshots), default=0.0), run.id)
    )
    return View(time.time() if taken_at is None else taken_at, tuple(runs))


def _run(run_id: str, ranks: list[RankView]) -> RunView:
    in_order = sorted(ranks, key=lambda rank: (rank.rank, rank.snapshot.started_at if rank.snapshot else 0.0))
    name = next((rank.snapshot.run_name for rank in in_order if rank.snapshot is not None), run_id)
    return RunView(run_id, name, tuple(in_order))


def _rank(page: Page, reading: PageReading) -> RankView:
    state: State = reading.state
    reason, age, said = reading.reason, reading.heartbeat_age, reading.snapshot
    if state == "live" and age is not None and age > FRESH_SECONDS:
        state, reason = "silent", f"alive, but has not published for {age:.0f} s: is it stopped?"
    elif state == "live" and said is None:
        reason = "has not published yet"
    rank = page.rank if said is None else said.rank
    return RankView(rank, state, reason, age, said, reading.description)
