"""The last ten minutes of each run in a ring, one entry per second. The web page draws them when it is opened."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from service.view import RankView, RunView, View
from tiering.telemetry import Snapshot

INTERVAL = 1.0  # seconds between entries
LENGTH = 600  # entries kept of a run: ten minutes

TierName = Literal["device", "host", "nvme"]
TIERS: tuple[TierName, ...] = ("device", "host", "nvme")


@dataclass(frozen=True)
class HistoryEntry:
    """One second of a run, over its ranks on this node. None means unknown.

    ``at`` is Unix time. ``read`` and ``written`` are bytes per second from and to NVMe, ``sent`` those to other ranks.
    ``stall`` is the share of the time in which compute waited, the mean over the ranks. ``h2d`` and ``d2h`` are bytes
    per second to the device and from it; None also if no rank has a device with its own memory.
    """

    at: float
    step: int | None
    read: float | None
    written: float | None
    sent: float | None
    stall: float | None
    used: dict[TierName, int | None]
    h2d: float | None = None
    d2h: float | None = None


class _Counters(NamedTuple):
    """The counters of one rank as it published them at ``at``."""

    at: float
    read: int
    written: int
    sent: int
    stall: float
    h2d: int | None
    d2h: int | None


@dataclass
class _Ring:
    entries: deque[HistoryEntry] = field(default_factory=lambda: deque(maxlen=LENGTH))
    counters: dict[tuple[int, float], _Counters] = field(default_factory=dict)


class History:
    """A ring for each run that has a status file, until its last one is removed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}
        self._added_at = self._due = 0.0  # Unix time of the last entries, and when the next are due

    def of(self, run_id: str) -> list[HistoryEntry]:
        """The entries of a run, oldest first."""
        ring = self._rings.get(run_id)
        return list(ring.entries) if ring is not None else []

    def latest(self, run_id: str) -> HistoryEntry | None:
        """The newest entry of a run."""
        ring = self._rings.get(run_id)
        return ring.entries[-1] if ring is not None and ring.entries else None

    def add(self, view: View) -> None:
        """Add an entry for each run that has not ended, if INTERVAL has passed since the previous one.

        A reading may be early by a quarter of INTERVAL. The average is still one entry per INTERVAL.
        """
        if self._added_at <= view.taken_at < self._due - INTERVAL / 4:
            return
        follows = self._added_at <= view.taken_at < self._due + INTERVAL
        self._added_at, self._due = view.taken_at, (self._due if follows else view.taken_at) + INTERVAL
        self._rings = {run.id: self._rings.get(run.id) or _Ring() for run in view.runs}
        for run in view.runs:
            if not run.over:
                ring = self._rings[run.id]
                entry, ring.counters = _entry(run, view.taken_at, ring.counters)
                while ring.entries and ring.entries[-1].at >= entry.at:  # the clock was set back
                    ring.entries.pop()
                ring.entries.append(entry)


def _entry(
    run: RunView, at: float, before: dict[tuple[int, float], _Counters]
) -> tuple[HistoryEntry, dict[tuple[int, float], _Counters]]:
    """The new entry, and the counters to compare the next reading with.

    A rate is the difference of a counter between two publications, over the time between these: readings and
    publications are not synchronous.
    """
    counters = {
        (rank.rank, rank.snapshot.started_at): _counters(rank.snapshot, rank.published_at)
        for rank in run.ranks
        if rank.fresh and rank.snapshot is not None and rank.published_at is not None
    }
    pairs = [
        (before[key], current)
        for key, current in counters.items()
        if key in before and current.at > before[key].at
    ]
    stalls = list(_rates(pairs, lambda counters: counters.stall))
    entry = HistoryEntry(
        at=at,
        step=max((snapshot.step for snapshot in run.snapshots), default=None),
        read=_sum(_rates(pairs, lambda counters: counters.read)),
        written=_sum(_rates(pairs, lambda counters: counters.written)),
        sent=_sum(_rates(pairs, lambda counters: counters.sent)),
        stall=min(1.0, sum(stalls) / len(stalls)) if stalls else None,
        used={tier: _used(run.ranks, tier) for tier in TIERS},
        h2d=_sum(_rates(pairs, lambda counters: counters.h2d)),
        d2h=_sum(_rates(pairs, lambda counters: counters.d2h)),
    )
    return entry, counters


def _counters(snapshot: Snapshot, at: float) -> _Counters:
    link = snapshot.link
    return _Counters(
        at,
        sum(path.read.bytes for path in snapshot.io),
        sum(path.written.bytes for path in snapshot.io),
        sum(collective.sent_bytes for collective in snapshot.collectives),
        sum(snapshot.stalls.values()),
        None if link is None else link.h2d.bytes,
        None if link is None else link.d2h.bytes,
    )


def _rates(
    pairs: Iterable[tuple[_Counters, _Counters]], counter: Callable[[_Counters], float | None]
) -> Iterator[float]:
    for previous, current in pairs:
        start, end = counter(previous), counter(current)
        if start is not None and end is not None:
            yield max(0.0, end - start) / (current.at - previous.at)


def _sum(rates: Iterator[float]) -> float | None:
    values = list(rates)
    return sum(values) if values else None


def _used(ranks: Iterable[RankView], name: TierName) -> int | None:
    bytes_of_ranks = [
        tier.used
        for rank in ranks
        if rank.fresh and rank.snapshot is not None
        for tier in rank.snapshot.tiers
        if tier.name == name
    ]
    return sum(bytes_of_ranks) if bytes_of_ranks else None
