"""Metrics of a rank: those that its snapshot and its plan declare, and those computed from several fields.

Units are bytes and seconds. Rates and percentiles in status files are left out: Prometheus computes them from counters
and buckets for any ranks and any interval, but cannot aggregate finished rates or percentiles.
"""

from __future__ import annotations

from itertools import accumulate

from service.metrics.families import Family, Histogram, Values, gauge
from service.metrics.from_figures import families_of
from service.progress import last_step_at
from service.recent_steps import recent_steps
from service.view import RankView
from tiering.telemetry import DirectionStatus, PlanStatus, Snapshot

# Powers of two nanoseconds, as engines count them, from 16 us to 8.6 s. The buckets never change: one that appeared
# later would be missing in a rate.
LATENCY_POWERS = range(14, 34)
LATENCY_BOUNDS = tuple(str(2.0**power / 1e9) for power in LATENCY_POWERS)


RANK_UP: Family[RankView] = gauge(
    "tiering_rank_up",
    "1 if the rank may be running, 0 if its process is gone and has left its status file.",
    # 1 also if the status file cannot be read: the process may still train.
    lambda rank: float(rank.state != "stale"),
)


def _rank_info(rank: RankView) -> Values:
    snapshot, engine = rank.snapshot, rank.snapshot.io_engine if rank.snapshot is not None else None
    if snapshot is None:
        return {}
    device = rank.description.device if rank.description is not None else ""
    name, flags = (engine.name, ",".join(sorted(engine.flags))) if engine is not None else ("", "")
    mesh = ",".join(f"{dimension}={place}" for dimension, place in snapshot.mesh.items())
    return {(snapshot.node, str(snapshot.local_rank), mesh, device, name, flags): 1}


# For live ranks. The age shows whether their process hangs.
RANK_METRICS: tuple[Family[RankView], ...] = (
    # An age instead of the usual timestamp: the clock of the Prometheus server may differ from this node's.
    gauge(
        "tiering_rank_heartbeat_age_seconds",
        "Seconds since the rank last published; ranks publish four times a second.",
        lambda rank: rank.heartbeat_age,
    ),
    Family(
        "info",
        "tiering_rank_info",
        "The node of the rank, its place in a mesh, its device, and its I/O engine.",
        ("node", "local_rank", "mesh", "device", "io_engine", "io_flags"),
        _rank_info,
    ),
)


def _recent_step(snapshot: Snapshot) -> float | None:
    steps = recent_steps(snapshot)
    return None if steps is None else steps.seconds


def _recent_stall(snapshot: Snapshot) -> float | None:
    steps = recent_steps(snapshot)
    return None if steps is None else steps.share


def _latency(direction: DirectionStatus) -> Histogram:
    below = [0, *accumulate(direction.latency_buckets)]  # below[i]: in less than 2^i ns
    counts = [below[min(power, len(below) - 1)] for power in LATENCY_POWERS]
    return Histogram(LATENCY_BOUNDS, counts, below[-1], direction.latency_seconds)


SNAPSHOT_METRICS: tuple[Family[Snapshot], ...] = (
    *families_of(Snapshot),
    gauge(
        "tiering_recent_step_seconds",
        "Seconds from the end of one step to the end of the next: median of the last 32, without the first of the run.",
        _recent_step,
    ),
    gauge(
        "tiering_recent_stall_ratio",
        "Share of the time of these steps in which compute waited, 0 to 1.",
        _recent_stall,
    ),
    gauge(
        "tiering_last_step_timestamp_seconds",
        "Unix time at which the last optimizer step ended.",
        last_step_at,
    ),
    Family(
        "info",
        "tiering_swap_path_info",
        "The I/O engine of a swap path, and whether it bypasses the page cache.",
        ("path", "io_engine", "direct"),
        lambda snapshot: {(path.path, path.engine, str(path.direct).lower()): 1 for path in snapshot.io},
    ),
    Family(
        "histogram",
        "tiering_swap_latency_seconds",
        "Seconds from issue to completion of a request.",
        ("path", "direction"),
        lambda snapshot: {
            (path.path, direction): _latency(transfers)
            for path in snapshot.io
            for direction, transfers in (("read", path.read), ("write", path.written))
        },
    ),
)

PLAN_METRICS: tuple[Family[PlanStatus], ...] = families_of(PlanStatus)
