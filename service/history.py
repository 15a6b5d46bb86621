"""The last minutes of each run, one entry per second, in rings: what the page draws when it is opened."""

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
class Entry:
    """One second of a run, over its ranks on this node. None where nothing was known.

    ``at`` is Unix time; rates are bytes per second over NVMe, and sent to other ranks; ``stall`` is the share of the
    time in which compute waited, the mean over the ranks. ``h2d`` and ``d2h`` are bytes per second to the device and
    from it; None also where no rank has a device with memory of its own.
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


class _Counted(NamedTuple):
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
    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=LENGTH))
    counted: dict[tuple[int, float], _Counted] = field(default_factory=dict)


class History:
    """Rings of the runs that have pages; that of a run goes with its last page. Belongs to one event loop."""

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}
        self._added_at = self._due = 0.0  # Unix time of the last entries, and when the next are due

    def of(self, run_id: str) -> list[Entry]:
        """What is known of a run, oldest first."""
        ring = self._rings.get(run_id)
        return list(ring.entries) if ring is not None else []

    def latest(self, run_id: str) -> Entry | None:
        """The newest of them."""
        ring = self._rings.get(run_id)
        return ring.entries[-1] if ring is not None and ring.entries else None

    def add(self, view: View) -> None:
        """One more entry for each run that is not over, if INTERVAL has passed since the one before.

        Readings come early by up to a quarter of it; over many of them there is still one entry for each INTERVAL.
        """
        if self._added_at <= view.taken_at < self._due - INTERVAL / 4:
            return
        follows = self._added_at <= view.taken_at < self._due + INTERVAL
        self._added_at, self._due = view.taken_at, (self._due if follows else view.taken_at) + INTERVAL
        self._rings = {run.id: self._rings.get(run.id) or _Ring() for run in view.runs}
        for run in view.runs:
            if not run.over:
                ring = self._rings[run.id]
                entry, ring.counted = _entry(run, view.taken_at, ring.counted)
                while ring.entries and ring.entries[-1].at >= entry.at:  # the clock was set back
                    ring.entries.pop()
                ring.entries.append(entry)


def _entry(
    run: RunView, at: float, before: dict[tuple[int, float], _Counted]
) -> tuple[Entry, dict[tuple[int, float], _Counted]]:
    """What happened since ``before``, and what to compare the next reading with.

    Rates are differences of counters over the time between the two publications they come from: readings and
    publications are not in step.
    """
    counted = {
        (rank.rank, rank.snapshot.started_at): _counted(rank.snapshot, rank.published_at)
        for rank in run.ranks
        if rank.fresh and rank.snapshot is not None and rank.published_at is not None
    }
    pairs = [(before[key], now) for key, now in counted.items() if key in before and now.at > before[key].at]
    stalls = list(_rates(pairs, lambda one: one.stall))
    entry = Entry(
        at=at,
        step=max((said.step for said in run.snapshots), default=None),
        read=_sum(_rates(pairs, lambda one: one.read)),
        written=_sum(_rates(pairs, lambda one: one.written)),
        sent=_sum(_rates(pairs, lambda one: one.sent)),
        stall=min(1.0, sum(stalls) / len(stalls)) if stalls else None,
        used={tier: _used(run.ranks, tier) for tier in TIERS},
        h2d=_sum(_rates(pairs, lambda one: one.h2d)),
        d2h=_sum(_rates(pairs, lambda one: one.d2h)),
    )
    return entry, counted


def _counted(said: Snapshot, at: float) -> _Counted:
    link = said.link
    return _Counted(
        at,
        sum(path.read.bytes for path in said.io),
        sum(path.written.bytes for path in said.io),
        sum(one.sent_bytes for one in said.collectives),
        sum(said.stalls.values()),
        None if link is None else link.h2d.bytes,
        None if link is None else link.d2h.bytes,
    )


def _rates(
    pairs: Iterable[tuple[_Counted, _Counted]], of: Callable[[_Counted], float | None]
) -> Iterator[float]:
    for before, now in pairs:
        then, since = of(before), of(now)
        if then is not None and since is not None:
            yield max(0.0, since - then) / (now.at - before.at)


def _sum(rates: Iterator[float]) -> float | None:
    known = list(rates)
    return sum(known) if known else None


def _used(ranks: Iterable[RankView], name: TierName) -> int | None:
    known = [
        tier.used
        for rank in ranks
        if rank.fresh and rank.snapshot is not None
        for tier in rank.snapshot.tiers
        if tier.name == name
    ]
    return sum(known) if known else None
