"""Metrics of a rank: those that its snapshot and its plan declare, and those that take more than one field.

Units are bytes and seconds. What pages have as rates and percentiles is left out: those of several ranks, or of another
window, can be made of counters and buckets, but not of each other.
"""

from __future__ import annotations

from itertools import accumulate

from service.metrics.families import Family, Histogram, Values, gauge
from service.metrics.from_figures import declared
from service.recent_steps import recent
from service.view import RankView
from tiering.telemetry import DirectionStatus, PlanStatus, Snapshot

# Powers of two nanoseconds, as engines count them, from 16 us to 8.6 s. The same from the first scrape on: a bucket
# that appears later would be missing in a rate.
LATENCY_POWERS = range(14, 34)
LATENCY_BOUNDS = tuple(str(2.0**power / 1e9) for power in LATENCY_POWERS)


RANK_UP: Family[RankView] = gauge(
    "tiering_rank_up",
    "Whether the rank may be running (1), or its process is gone and has left its page (0).",
    # Not 0 where a page cannot be read: its process may well train.
    lambda rank: float(rank.state != "stale"),
)


def _rank_info(rank: RankView) -> Values:
    said, engine = rank.snapshot, rank.snapshot.io_engine if rank.snapshot is not None else None
    if said is None:
        return {}
    device = rank.description.device if rank.description is not None else ""
    name, flags = (engine.name, ",".join(sorted(engine.flags))) if engine is not None else ("", "")
    return {(said.node, str(said.local_rank), device, name, flags): 1}


# Of ranks that live; their process may hang, which is what the age is for.
OF_RANK: tuple[Family[RankView], ...] = (
    # An age, though moments are more common: the clock of whoever asks need not be this node's.
    gauge(
        "tiering_rank_heartbeat_age_seconds",
        "Seconds since the rank last published, which it does four times a second.",
        lambda rank: rank.heartbeat_age,
    ),
    Family(
        "info",
        "tiering_rank_info",
        "Where the rank runs, on what it computes, and the I/O engine that swaps for it.",
        ("node", "local_rank", "device", "io_engine", "io_flags"),
        _rank_info,
    ),
)


def _recent_step(said: Snapshot) -> float | None:
    found = recent(said)
    return None if found is None else found.seconds


def _recent_stall(said: Snapshot) -> float | None:
    found = recent(said)
    return None if found is None else found.share


def _latency(one: DirectionStatus) -> Histogram:
    below = [0, *accumulate(one.latency_buckets)]  # below[i]: in less than 2^i ns
    counts = [below[min(power, len(below) - 1)] for power in LATENCY_POWERS]
    return Histogram(LATENCY_BOUNDS, counts, below[-1], one.latency_seconds)


OF_SNAPSHOT: tuple[Family[Snapshot], ...] = (
    *declared(Snapshot),
    gauge(
        "tiering_recent_step_seconds",
        "Seconds from the end of one step to that of the next: the median of the last 32, the run's first left out.",
        _recent_step,
    ),
    gauge(
        "tiering_recent_stall_ratio",
        "Share of the time of those steps in which compute waited, 0 to 1.",
        _recent_stall,
    ),
    gauge(
        "tiering_last_step_timestamp_seconds",
        "Unix time at which the last optimizer step ended.",
        lambda said: said.steps[-1].ended_at or None if said.steps else None,
    ),
    Family(
        "info",
        "tiering_swap_path_info",
        "How a swap path is accessed: by which I/O engine, and whether past the page cache.",
        ("path", "io_engine", "direct"),
        lambda said: {(path.path, path.engine, str(path.direct).lower()): 1 for path in said.io},
    ),
    Family(
        "histogram",
        "tiering_swap_latency_seconds",
        "Seconds from issue to completion of a request.",
        ("path", "direction"),
        lambda said: {
            (path.path, direction): _latency(one)
            for path in said.io
            for direction, one in (("read", path.read), ("write", path.written))
        },
    ),
)

OF_PLAN: tuple[Family[PlanStatus], ...] = declared(PlanStatus)
