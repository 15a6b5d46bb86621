"""The content of all status files of a run directory at one moment, by run and rank. All outputs are made from it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tiering.telemetry import Description, EndStatus, Snapshot, StatusFile, StatusReading

# Ranks publish four times a second. A rank that has not published for this long is stopped or starved.
FRESH_SECONDS = 10.0

State = Literal["live", "silent", "stale", "newer-version", "torn", "unreadable"]
RunState = Literal["training", "degraded", "ended"]


class NotHereError(LookupError):
    """The requested run or rank has no status file on this node. The message has the remedy."""


@dataclass(frozen=True)
class RankView:
    """One rank as its status file shows it; ``snapshot`` is None if the file cannot be read.

    "silent" is a live rank that has not published for FRESH_SECONDS: stopped, or without CPU time. The other states are
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
        """How the run ended, as the rank reported it; None while the rank lives, and if it was killed."""
        return None if self.snapshot is None or self.state != "stale" else self.snapshot.ended

    @property
    def ended_well(self) -> bool:
        """Whether the rank finished, or stopped at a signal."""
        return self.ended is not None and self.ended.how != "failed"

    @property
    def fresh(self) -> bool:
        """Whether the snapshot is current."""
        return self.state == "live" and self.snapshot is not None


@dataclass(frozen=True)
class RunView:
    """All ranks on this node of one start of a training script, in order."""

    id: str
    name: str
    ranks: tuple[RankView, ...]

    @property
    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshots of the ranks that have one, in order."""
        return (rank.snapshot for rank in self.ranks if rank.snapshot is not None)

    @cached_property
    def expected(self) -> int:
        """The number of ranks of the run on this node: as they report it, and at least the number of status files."""
        reported = max((snapshot.local_world_size for snapshot in self.snapshots), default=0)
        return max(reported, len({rank.rank for rank in self.ranks}))

    @property
    def fresh(self) -> set[int]:
        """Ranks with a fresh status file. A start that died may have left another file of the same rank."""
        return {rank.rank for rank in self.ranks if rank.fresh}

    @property
    def missing(self) -> int:
        """The number of expected ranks without a status file."""
        return self.expected - len({rank.rank for rank in self.ranks})

    @property
    def over(self) -> bool:
        """Whether every rank has ended."""
        return all(rank.state == "stale" for rank in self.ranks)

    @property
    def state(self) -> RunState:
        """ "degraded" if a rank of this node is missing, silent, unreadable or cannot continue."""
        if self.over:
            return "ended"
        complete = len(self.fresh) == self.expected and not any(
            snapshot.broken for snapshot in self.snapshots
        )
        return "training" if complete else "degraded"


@dataclass(frozen=True)
class View:
    """``taken_at`` is Unix time; runs are sorted by name, then by start.

    ``readings`` counts the readings of ``directory`` up to this one, and ``changes`` those that found a change.
    ``closed`` has the ranks that finished, or stopped at a signal; they do not belong to ``runs`` any more.
    """

    taken_at: float
    runs: tuple[RunView, ...]
    directory: str = ""
    readings: int = 0
    changes: int = 0
    closed: tuple[RunView, ...] = ()

    def run(self, run_id: str) -> RunView | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def select(self, run: str | None = None, rank: int | None = None) -> Sequence[RunView]:
        """The runs and ranks that match the filters. Raises NotHereError if none does."""
        runs = self.runs
        if run is not None:
            runs = tuple(candidate for candidate in runs if candidate.id == run)
            if not runs:
                raise NotHereError(self._hint(run))
        if rank is None:
            return runs
        filtered = tuple(replace(run, ranks=tuple(r for r in run.ranks if r.rank == rank)) for run in runs)
        if not any(run.ranks for run in filtered):
            raise NotHereError(
                f"rank {rank} has no status file on this node; /v1/status lists the ranks that have one"
            )
        return filtered

    def _hint(self, requested: str) -> str:
        ids = [run.id for run in self.runs if run.name == requested]
        if ids:
            return f"this is the name of a run, not its id; use an id: {', '.join(ids[-3:])}"
        return "no run with this id has a status file on this node; /v1/runs lists the runs that have one"

    def differs_from(self, previous: View) -> bool:
        """Whether a rank published since ``previous``, or a status file appeared, was removed or changed its state."""
        ranks = [(run.id, rank) for run in self.runs for rank in run.ranks]
        previous_ranks = [(run.id, rank) for run in previous.runs for rank in run.ranks]
        return len(ranks) != len(previous_ranks) or any(
            run_id != previous_id or _changed(rank, previous_rank)
            for (run_id, rank), (previous_id, previous_rank) in zip(ranks, previous_ranks, strict=True)
        )


def _changed(rank: RankView, previous: RankView) -> bool:
    return (rank.rank, rank.state, rank.reason, rank.published_at) != (
        previous.rank,
        previous.state,
        previous.reason,
        previous.published_at,
    )


def view_of(
    readings: Iterable[tuple[StatusFile, StatusReading]],
    taken_at: float | None = None,
    *,
    fresh_seconds: float = FRESH_SECONDS,
) -> View:
    """Group the readings by run. A status file that cannot be read belongs to the run in its file name."""
    files = list(readings)
    ids = {
        file.run_name: snapshot.run_id
        for file, reading in files
        if (snapshot := reading.snapshot) and snapshot.run_id
    }
    ranks: dict[str, list[RankView]] = {}
    closed: dict[str, list[RankView]] = {}
    for file, reading in files:
        snapshot = reading.snapshot
        run_id = (snapshot.run_id if snapshot is not None else ids.get(file.run_name, "")) or file.run_name
        rank = _rank(file, reading, fresh_seconds)
        (closed if rank.ended_well else ranks).setdefault(run_id, []).append(rank)
    runs = [_run(run_id, members) for run_id, members in ranks.items()]
    runs.sort(key=lambda run: (run.name, min((s.started_at for s in run.snapshots), default=0.0), run.id))
    return View(
        time.time() if taken_at is None else taken_at,
        tuple(runs),
        closed=tuple(_run(run_id, members) for run_id, members in closed.items()),
    )


def _run(run_id: str, ranks: list[RankView]) -> RunView:
    in_order = sorted(ranks, key=lambda rank: (rank.rank, rank.snapshot.started_at if rank.snapshot else 0.0))
    name = next((rank.snapshot.run_name for rank in in_order if rank.snapshot is not None), run_id)
    return RunView(run_id, name, tuple(in_order))


def _rank(file: StatusFile, reading: StatusReading, fresh_seconds: float) -> RankView:
    state: State = reading.state
    reason, age, snapshot = reading.reason, reading.heartbeat_age, reading.snapshot
    if state == "live" and age is not None and age > fresh_seconds:
        state, reason = "silent", f"alive, but has not published for {age:.0f} s: is it stopped?"
    elif state == "live" and snapshot is None:
        reason = "has not published yet"
    rank = file.rank if snapshot is None else snapshot.rank
    return RankView(rank, state, reason, age, snapshot, reading.description, reading.published_at)
