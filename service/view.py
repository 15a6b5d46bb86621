"""The status of all ranks at one moment, by run: in a run directory, or on several nodes. All outputs come from it."""

from __future__ import annotations

import pwd
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal, Protocol

from service.progress import PhaseDuration, phase_duration
from service.recent_steps import RecentSteps, recent_steps
from tiering.telemetry import Description, EndStatus, Snapshot, StatusReading

# Ranks publish four times a second. A rank that has not published for this long is stopped or starved.
FRESH_SECONDS = 10.0

State = Literal["live", "silent", "stale", "newer-version", "torn", "unreadable", "unreachable"]
RunState = Literal["training", "stuck", "degraded", "ended"]


class NotHereError(LookupError):
    """The requested run or rank has no status file here. The message has the remedy."""


class RankFile(Protocol):
    """The name of a status file, and its owner: a uid of this node, or the name of a user on another node."""

    @property
    def run_name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def owner(self) -> int | str | None: ...


RankReading = tuple[RankFile, StatusReading]


@dataclass(frozen=True)
class Node:
    """A node whose tierd is read. ``answered_at`` is the Unix time of its last answer, None before the first.

    ``problem`` is why it does not answer now; empty if it does. ``ranks`` is the number of its ranks in this reading.
    """

    address: str
    problem: str
    answered_at: float | None
    ranks: int


@dataclass(frozen=True)
class Reading:
    """The ranks in a source at one moment. ``nodes`` is None if the source is the run directory of this node.

    ``unreachable`` has, by the index of a reading, why the node of the rank does not answer: the reading is an old one.
    """

    ranks: Sequence[RankReading]
    nodes: tuple[Node, ...] | None = None
    unreachable: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankView:
    """One rank as its status file shows it; ``snapshot`` is None if the file cannot be read.

    "silent" is a live rank that has not published for FRESH_SECONDS: stopped, or without CPU time. "unreachable" is one
    whose node does not answer, as it was when the node last answered. The other states are those of a StatusReading,
    and so are ``heartbeat_age``, ``published_at`` and ``reason``.
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

    @cached_property
    def recent_steps(self) -> RecentSteps | None:
        """The steady steps; None before the first."""
        return None if self.snapshot is None else recent_steps(self.snapshot)

    @cached_property
    def phase_duration(self) -> PhaseDuration | None:
        """The duration of the current phase of a fresh rank."""
        return phase_duration(self.snapshot, self.published_at) if self.fresh and self.snapshot else None


@dataclass(frozen=True)
class RunView:
    """The ranks of one start of a training script, in order: those on this node, or those on all nodes."""

    id: str
    name: str
    ranks: tuple[RankView, ...]
    user: str = ""
    on_all_nodes: bool = False

    @property
    def where(self) -> str:
        """Where the ranks are, for the end of a sentence."""
        return "on all nodes" if self.on_all_nodes else "on this node"

    @property
    def snapshots(self) -> Iterator[Snapshot]:
        """The snapshots of the ranks that have one, in order."""
        return (rank.snapshot for rank in self.ranks if rank.snapshot is not None)

    @cached_property
    def expected(self) -> int:
        """The number of ranks that should be here: as they report it, and at least the number of status files."""
        reported = max(
            (
                snapshot.world_size if self.on_all_nodes else snapshot.local_world_size
                for snapshot in self.snapshots
            ),
            default=0,
        )
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
        """ "degraded" if a rank that should be here is missing, silent, unreadable or cannot continue.

        "stuck" if the phase of a rank takes too long.
        """
        if self.over:
            return "ended"
        complete = len(self.fresh) == self.expected and not any(
            snapshot.broken for snapshot in self.snapshots
        )
        if not complete:
            return "degraded"
        return (
            "stuck"
            if any(rank.phase_duration and rank.phase_duration.is_stuck for rank in self.ranks)
            else "training"
        )


@dataclass(frozen=True)
class View:
    """``taken_at`` is Unix time; runs are sorted by name, then by start.

    ``readings`` counts the readings of ``directory`` up to this one, and ``changes`` those that found a change.
    ``nodes`` is None for the run directory of this node. ``closed`` has the ranks that finished, or stopped at a
    signal; they do not belong to ``runs`` any more.
    """

    taken_at: float
    runs: tuple[RunView, ...]
    directory: str = ""
    readings: int = 0
    changes: int = 0
    closed: tuple[RunView, ...] = ()
    nodes: tuple[Node, ...] | None = None

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
                f"rank {rank} has no status file here; /v1/status lists the ranks that have one"
            )
        return filtered

    def _hint(self, requested: str) -> str:
        ids = [run.id for run in self.runs if run.name == requested]
        if ids:
            return f"this is the name of a run, not its id; use an id: {', '.join(ids[-3:])}"
        return "no run with this id has a status file here; /v1/runs lists the runs that have one"

    def differs_from(self, previous: View) -> bool:
        """Whether a rank published since ``previous``, or a status file appeared, was removed or changed its state.

        Also whether a node answers, or does not, in contrast to ``previous``.
        """
        if [node.problem for node in self.nodes or ()] != [node.problem for node in previous.nodes or ()]:
            return True
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


def view_of(reading: Reading, taken_at: float | None = None, *, fresh_seconds: float = FRESH_SECONDS) -> View:
    """Group the ranks by run. A status file that cannot be read belongs to the run in its file name."""
    ids = {
        (file.owner, file.run_name): snapshot.run_id
        for file, status in reading.ranks
        if (snapshot := status.snapshot) and snapshot.run_id
    }
    # By the owner and the id: another user may publish with any id.
    ranks: dict[tuple[int | str | None, str], list[RankView]] = {}
    closed: dict[tuple[int | str | None, str], list[RankView]] = {}
    for index, (file, status) in enumerate(reading.ranks):
        snapshot = status.snapshot
        known = snapshot.run_id if snapshot is not None else ids.get((file.owner, file.run_name), "")
        rank = _rank(file, status, fresh_seconds, reading.unreachable.get(index, ""))
        (closed if rank.ended_well else ranks).setdefault((file.owner, known or file.run_name), []).append(
            rank
        )
    owners = Counter(run_id for _, run_id in ranks.keys() | closed.keys())
    on_all_nodes = reading.nodes is not None
    runs = [_run(*key, members, owners, on_all_nodes) for key, members in ranks.items()]
    runs.sort(key=lambda run: (run.name, min((s.started_at for s in run.snapshots), default=0.0), run.id))
    return View(
        time.time() if taken_at is None else taken_at,
        tuple(runs),
        closed=tuple(_run(*key, members, owners, on_all_nodes) for key, members in closed.items()),
        nodes=reading.nodes,
    )


def _run(
    owner: int | str | None,
    run_id: str,
    ranks: list[RankView],
    owners: Mapping[str, int],
    on_all_nodes: bool,
) -> RunView:
    user = owner if isinstance(owner, str) else "" if owner is None else user_name(owner)
    # No id of an engine has an "@": one that has could be that of another user's run.
    run_id = f"{run_id}@{user}" if owners[run_id] > 1 or "@" in run_id else run_id
    in_order = sorted(ranks, key=lambda rank: (rank.rank, rank.snapshot.started_at if rank.snapshot else 0.0))
    name = next((rank.snapshot.run_name for rank in in_order if rank.snapshot is not None), run_id)
    return RunView(run_id, name, tuple(in_order), user, on_all_nodes)


@cache
def user_name(uid: int) -> str:
    """The name of a user, or the uid."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _rank(file: RankFile, reading: StatusReading, fresh_seconds: float, unreachable: str) -> RankView:
    state: State = reading.state
    reason, age, snapshot = reading.reason, reading.heartbeat_age, reading.snapshot
    # The state of a rank that ended before its node stopped answering does not change any more.
    if unreachable and state != "stale":
        state, reason = "unreachable", unreachable
    elif state == "live" and age is not None and age > fresh_seconds:
        state, reason = "silent", f"alive, but has not published for {age:.0f} s: is it stopped?"
    elif state == "live" and snapshot is None:
        reason = "has not published yet"
    rank = file.rank if snapshot is None else snapshot.rank
    return RankView(rank, state, reason, age, snapshot, reading.description, reading.published_at)
