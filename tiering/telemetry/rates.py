"""Bandwidths of a snapshot, from its counters and those of the one before."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tiering.telemetry.snapshot import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    LinkStatus,
    PathStatus,
    Snapshot,
)

Moving = TypeVar("Moving", DirectionStatus, CopyStatus)


def with_rates(current: Snapshot, previous: Snapshot | None, seconds: float | None) -> Snapshot:
    """``current`` with its bandwidths filled in from the counters of ``previous``, taken ``seconds`` earlier.

    Without ``seconds``, which are too few to divide by, they are those of ``previous``.
    A path or kind that ``previous`` lacks, a counter that went back (the engine was rebuilt) or no elapsed time gives
    a rate of zero; the average over busy time needs no second sample.
    """
    paths_before = {path.path: path for path in previous.io} if previous is not None else {}
    kinds_before = {one.kind: one for one in previous.collectives} if previous is not None else {}
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
            # A window has idle time in it, the average has none: it was reached, too.
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
        collectives=[kind_rated(one) for one in current.collectives],
    )
