"""The transfers of a rank, as parts of its snapshot: with NVMe, over the device's link, and with other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tiering.telemetry.figure import Figure, Integer, Label


@dataclass(frozen=True)
class LatencyStatus:
    """Percentiles of the time from issue to completion of all operations since the start, in seconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    longest: float


@dataclass(frozen=True)
class DirectionStatus:
    """Reads or writes of one path since the start; rates are bytes per second.

    ``latency_buckets[i]`` counts the operations that took [2^i, 2^(i+1)) nanoseconds; empty buckets at the end are left
    out. ``latency_seconds`` is the sum of all latencies. ``latency`` comes from a finer histogram, and is None before
    the first operation.
    """

    bytes: Annotated[Integer, Figure("Bytes swapped since the start.", "tiering_swap_bytes_total")] = 0
    ops: Annotated[
        Integer,
        Figure(
            "Requests to the I/O engine that have completed since the start.", "tiering_swap_operations_total"
        ),
    ] = 0
    retries: Annotated[
        Integer,
        Figure(
            "Requests that were continued after a short transfer, or reissued, since the start.",
            "tiering_swap_retries_total",
        ),
    ] = 0
    rereads: Annotated[
        Integer,
        Figure(
            "Reads that were tried again after an error of the drive (EIO, ETIMEDOUT, ENOLINK) since the start;"
            " the retries include them.",
            "tiering_swap_rereads_total",
        ),
    ] = 0
    errors: Annotated[
        Integer, Figure("Requests that failed since the start.", "tiering_swap_errors_total")
    ] = 0
    in_flight: Annotated[
        Integer, Figure("Requests in flight in the I/O engine now.", "tiering_swap_operations_in_flight")
    ] = 0
    busy_seconds: Annotated[
        float,
        Figure(
            "Seconds with at least one transfer in flight since the start.", "tiering_swap_busy_seconds_total"
        ),
    ] = 0.0
    # Over the publisher's last interval.
    bytes_per_second: float = 0.0
    # Over the time with at least one transfer in flight.
    average_bytes_per_second: float = 0.0
    # Maximum over all intervals and averages so far.
    peak_bytes_per_second: float = 0.0
    # In addition to the sum `errors`, which exists from the start: Prometheus sees no increase in a series whose first
    # sample is already 1.
    errors_by_errno: Annotated[
        dict[str, Integer],
        Figure(
            "Requests that failed since the start, by the name of the error; absent before the first.",
            "tiering_swap_errors_by_errno_total",
            by=("errno",),
        ),
    ] = field(default_factory=dict)
    latency_buckets: list[Integer] = field(default_factory=list)
    latency_seconds: float = 0.0
    latency: LatencyStatus | None = None


@dataclass(frozen=True)
class DriveStatus:
    """The wear of the NVMe drives behind a swap path, from their SMART logs, which only root may read."""

    used: Annotated[
        float,
        Figure(
            "Part of its endurance that the path's most worn NVMe drive has used, by its own estimate; it may exceed 1."
            " Absent unless the run may read SMART logs (root).",
            "tiering_drive_endurance_used_ratio",
        ),
    ]
    written: Annotated[
        Integer,
        Figure(
            "Bytes written to the path's NVMe drives since they were made, by anybody. Absent likewise.",
            "tiering_drive_written_bytes_total",
        ),
    ]
    endurance: Annotated[
        float | None,
        Figure(
            "Bytes that may be written to the path's NVMe drives in all, by their own estimate. Absent likewise, and"
            " below 5 % of use.",
            "tiering_drive_endurance_bytes",
        ),
    ] = None


@dataclass(frozen=True)
class PathStatus:
    """One swap path: its I/O engine, whether it bypasses the page cache, and both directions."""

    path: Annotated[str, Label("path")]
    engine: str
    direct: bool
    read: Annotated[DirectionStatus, Label("direction", "read")] = field(default_factory=DirectionStatus)
    written: Annotated[DirectionStatus, Label("direction", "write")] = field(default_factory=DirectionStatus)
    queue_full_seconds: Annotated[
        float,
        Figure(
            "Seconds in which transfers waited because the path's queue was full, since the start.",
            "tiering_swap_queue_full_seconds_total",
        ),
    ] = 0.0
    measured_bytes_per_second: Annotated[
        Integer | None,
        Figure(
            "Measured bandwidth that decides the path's part of each stripe; absent with a single path.",
            "tiering_swap_path_measured_bytes_per_second",
        ),
    ] = None
    recent_bytes_per_second: Annotated[
        Integer | None,
        Figure(
            "Bandwidth of the path while it was busy, in recent steps; absent with a single path.",
            "tiering_swap_path_recent_bytes_per_second",
        ),
    ] = None
    share: Annotated[
        float,
        Figure(
            "Part of its measured bandwidth for which the path gets new extents; 1 unless the path is slow.",
            "tiering_swap_path_share",
        ),
    ] = 1.0
    drive: DriveStatus | None = None


@dataclass(frozen=True)
class CopyStatus:
    """Copies over the device's link in one direction since the start; rates are bytes per second.

    ``bytes`` and ``copies`` count copies when they start; ``busy_seconds`` counts completed copies.
    """

    bytes: Annotated[
        Integer,
        Figure(
            "Bytes copied to the GPU (h2d) and from it (d2h) since the start; absent on a CPU.",
            "tiering_device_copy_bytes_total",
        ),
    ] = 0
    copies: Annotated[
        Integer,
        Figure(
            "Copies to the GPU (h2d) and from it (d2h) since the start; absent on a CPU.",
            "tiering_device_copies_total",
        ),
    ] = 0
    busy_seconds: Annotated[
        float,
        Figure(
            "Seconds with a copy in progress in that direction since the start, by the GPU's clock; absent on a CPU.",
            "tiering_device_copy_busy_seconds_total",
        ),
    ] = 0.0
    # Over the publisher's last interval.
    bytes_per_second: float = 0.0
    # Over the time with a copy in progress.
    average_bytes_per_second: float = 0.0
    # Maximum over all intervals and averages so far.
    peak_bytes_per_second: float = 0.0


@dataclass(frozen=True)
class LinkStatus:
    """The link between host memory and device memory: ``h2d`` to the device, ``d2h`` from it."""

    h2d: Annotated[CopyStatus, Label("direction", "h2d")] = field(default_factory=CopyStatus)
    d2h: Annotated[CopyStatus, Label("direction", "d2h")] = field(default_factory=CopyStatus)
    measured_bytes_per_second: Annotated[
        Integer | None,
        Figure(
            "Bandwidth of the slower direction of the link to the GPU, from tiering plan --measure; absent if not"
            " measured.",
            "tiering_device_link_measured_bytes_per_second",
        ),
    ] = None


@dataclass(frozen=True)
class IoEngineStatus:
    """The I/O engine and the features in effect ("registered_buffers", "verify").

    ``passed_over`` maps each engine or registration that was refused, at least in part, to the reason.
    """

    name: str
    flags: list[str] = field(default_factory=list)
    registered_bytes: Annotated[
        Integer,
        Figure(
            "Bytes of memory that are registered with the kernel for I/O; absent without swapping.",
            "tiering_io_registered_bytes",
        ),
    ] = 0
    passed_over: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveStatus:
    """Collectives of one ``kind`` ("all-gather", "reduce", "control") since the start, and bytes sent in them.

    The time spent waiting for them is part of the stalls.
    """

    kind: Annotated[str, Label("kind")]
    calls: Annotated[
        Integer,
        Figure(
            "Collectives in which the rank participated since the start.", "tiering_collective_calls_total"
        ),
    ] = 0
    sent_bytes: Annotated[
        Integer,
        Figure(
            "Bytes that the rank sent in collectives since the start.", "tiering_collective_sent_bytes_total"
        ),
    ] = 0
    # Over the publisher's last interval.
    sent_bytes_per_second: float = 0.0
