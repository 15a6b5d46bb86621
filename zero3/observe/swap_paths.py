"""Swap paths in a snapshot: the traffic of each in both directions, latencies, speed, and the wear of its drives."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, Literal

from tiering.storage.aio import AioContext
from tiering.storage.io_stats import DirectionStats
from tiering.storage.path_speeds import PathSpeed
from tiering.telemetry import DirectionStatus, LatencyStatus, PathStatus, as_text
from zero3.device.tiers import Tiers
from zero3.observe.drive_wear import DriveWear
from zero3.observe.free_memory import RateLimited

Kind = Literal["read", "write"]


class SwapPaths:
    """Describes the swap paths of ``tiers``, and with ``reads_wear`` the wear of their drives. Any thread may call."""

    def __init__(self, tiers: Tiers, *, reads_wear: bool) -> None:
        self._tiers = tiers
        self._wear = DriveWear() if reads_wear else None
        self._latencies: dict[tuple[tuple[int, ...], Kind], RateLimited[LatencyStatus]] = {}

    def status(self) -> list[PathStatus]:
        """Each path, as of now."""
        aio, swap = self._tiers.aio, self._tiers.swap
        if aio is None:
            return []
        speeds = {} if swap is None else swap.speeds.paths
        return [
            PathStatus(
                path=as_text(stats.name),
                engine=aio.engine,
                direct=stats.direct,
                read=_direction(stats.read, self._latency(aio, files, "read", stats.read)),
                written=_direction(stats.write, self._latency(aio, files, "write", stats.write)),
                queue_full_seconds=stats.queue_full_ns / 1e9,
                drive=None if self._wear is None else self._wear.of(stats.name),
                **_speed(speeds.get(stats.name)),
            )
            for stats, files in self._tiers.file_stats()
        ]

    def _latency(
        self, aio: AioContext, files: tuple[int, ...], kind: Kind, stats: DirectionStats
    ) -> LatencyStatus | None:
        if not stats.ops:
            return None
        if (files, kind) not in self._latencies:
            self._latencies[files, kind] = RateLimited(lambda: _percentiles(aio, files, kind), 1.0)
        return self._latencies[files, kind]()


def _speed(speed: PathSpeed | None) -> dict[str, Any]:
    """The fields of a PathStatus on the speed of a path that was measured."""
    if speed is None:
        return {}
    return {
        "measured_bytes_per_second": speed.measured,
        "recent_bytes_per_second": None if speed.recent is None else round(speed.recent),
        "share": speed.share,
    }


def _direction(stats: DirectionStats, latency: LatencyStatus | None) -> DirectionStatus:
    return DirectionStatus(
        bytes=stats.bytes,
        ops=stats.ops,
        retries=stats.retries,
        rereads=stats.rereads,
        errors=stats.errors,
        in_flight=stats.in_flight,
        busy_seconds=stats.busy_ns / 1e9,
        errors_by_errno={
            errno.errorcode.get(code, "other"): count for code, count in stats.errors_by_errno.items()
        },
        latency_buckets=list(stats.latency[: _last_used(stats.latency) + 1]),
        latency_seconds=stats.latency_ns / 1e9,
        latency=latency,
    )


def _percentiles(aio: AioContext, files: tuple[int, ...], kind: Kind) -> LatencyStatus:
    latencies = reduce(add, (aio.latencies(file, kind) for file in files))
    return LatencyStatus(*latencies.percentiles(0.5, 0.9, 0.99, 0.999, 1.0))


def _last_used(buckets: Sequence[int]) -> int:
    return max((index for index, count in enumerate(buckets) if count), default=-1)
