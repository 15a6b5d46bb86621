"""Bandwidths of a snapshot, computed from its counters and the counters of the previous snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tiering.telemetry.snapshot import Snapshot
from tiering.telemetry.transfer_status import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    LinkStatus,
    PathStatus,
)

Moving = TypeVar("Moving", DirectionStatus, CopyStatus)


def with_rates(current: Snapshot, previous: Snapshot | None, seconds: float | None) -> Snapshot:
    """``current`` with bandwidths in bytes per second, from the counters of ``previous``, ``seconds`` earlier.

    If ``seconds`` is None (too short an interval), the bandwidths of ``previous`` are kept.
    The rate is zero for a path or kind that ``previous`` lacks, for a counter that decreased (a new engine), and for
    an interval of zero. The average over busy time needs no second sample.
    """
    paths_before = {path.path: path for path in previous.io} if previous is not None else {}
    kinds_before = {status.kind: status for status in previous.collectives} if previous is not None else {}
    link_before = previous.link if previous is not None else None

    def rate(now: int, then: int, last: float) -> float:
        if seconds is None:
            return last
        return max(0, now - then) / seconds if seconds > 0 else 0.0

    def rated(now: Moving, then: Moving | None) -> Moving:
        moving = rate(now.bytes, then.bytes, then.bytes_per_second) if then else 0.0
        average = now.bytes / now.busy_seconds if now.busy_seconds > 0 else 0.0
        return replace(
            now,
            bytes_per_second=moving,
            # The average over busy time can be higher than the rate of an interval, which includes idle time.
            peak_bytes_per_second=max(moving, average, then.peak_bytes_per_second if then else 0.0),
            average_bytes_per_second=average,
        )

    def path_rated(now: PathStatus) -> PathStatus:
        then = paths_before.get(now.path)
        return replace(
            now,
            read=rated(now.read, then.read if then else None),
            written=rated(now.written, then.written if then else None),
        )

    def link_rated(now: LinkStatus, then: LinkStatus | None) -> LinkStatus:
        h2d, d2h = rated(now.h2d, then.h2d if then else None), rated(now.d2h, then.d2h if then else None)
        return replace(now, h2d=h2d, d2h=d2h)

    def kind_rated(now: CollectiveStatus) -> CollectiveStatus:
        then = kinds_before.get(now.kind)
        sending = rate(now.sent_bytes, then.sent_bytes, then.sent_bytes_per_second) if then else 0.0
        return replace(now, sent_bytes_per_second=sending)

    return replace(
        current,
        io=[path_rated(path) for path in current.io],
        link=None if current.link is None else link_rated(current.link, link_before),
        collectives=[kind_rated(status) for status in current.collectives],
    )
