"""What a rank publishes about itself: frozen records, their JSON form, and rates from two samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AllowInfNan, ConfigDict, Field, TypeAdapter, WithJsonSchema

RECENT_STEPS = 32  # in a snapshot
Phase = Literal["start", "forward", "backward", "step", "idle"]
COPIES_OF = (
    "copies of "  # begins each cause of a stall for the device's link; others are of NVMe or of other ranks
)

Integer = Annotated[
    int, Field(ge=-(1 << 63), lt=1 << 63), WithJsonSchema({"type": "integer", "format": "int64"})
]
"""One as C counts: what is larger is damage, and may be more than a float can hold."""

Diverging = Annotated[float, AllowInfNan(True)]
"""A number that training gives: it may be infinite, or none."""


@dataclass(frozen=True)
class TierStatus:
    """One tier of one rank, in bytes: ``capacity`` is what the machine has, ``budget`` what we may use.

    ``available`` is what nobody uses there now, None where that is not known.
    """

    name: Literal["device", "host", "nvme"]
    budget: Integer
    capacity: Integer
    used: Integer
    peak: Integer
    by_kind: dict[str, Integer] = field(default_factory=dict)
    available: Integer | None = None


@dataclass(frozen=True)
class ActivationStatus:
    """Bytes that autograd keeps for backward, beside the tiers: now, and the most so far."""

    used: Integer
    peak: Integer


@dataclass(frozen=True)
class DeviceMemoryStatus:
    """Bytes that torch has on the GPU, those of the device tier among them.

    ``allocated`` is in tensors now, ``peak`` was at most, ``reserved`` is what torch has taken from the driver.
    ``peak`` is since the start, or since the program has called torch.cuda.reset_peak_memory_stats.
    """

    allocated: Integer
    peak: Integer
    reserved: Integer


@dataclass(frozen=True)
class LatencyStatus:
    """Seconds within which that share of the operations since the start were over, from issue to completion."""

    p50: float
    p90: float
    p99: float
    p999: float
    longest: float


@dataclass(frozen=True)
class DirectionStatus:
    """Reads or writes of one path since the start; rates are bytes per second.

    ``errors_by_errno`` splits ``errors`` by name ("EIO"). ``latency_buckets[i]`` counts the operations that took
    [2^i, 2^(i+1)) nanoseconds; buckets behind the last that counts are left out. ``latency_seconds`` is their sum, and
    ``latency`` comes from a finer histogram; None while nothing has moved.
    """

    bytes: Integer = 0
    ops: Integer = 0
    retries: Integer = 0
    errors: Integer = 0
    in_flight: Integer = 0
    busy_seconds: float = 0.0
    bytes_per_second: float = 0.0  # over the publisher's last window
    average_bytes_per_second: float = 0.0  # over the time with at least one transfer in flight
    peak_bytes_per_second: float = 0.0  # the most of a window, or of the average so far
    errors_by_errno: dict[str, Integer] = field(default_factory=dict)
    latency_buckets: list[Integer] = field(default_factory=list)
    latency_seconds: float = 0.0
    latency: LatencyStatus | None = None


@dataclass(frozen=True)
class PathStatus:
    """One swap path: its I/O engine, whether it bypasses the page cache, and both directions.

    ``queue_full_seconds`` is the time in which transfers waited because the path had as many in flight as allowed.
    ``measured_bytes_per_second`` is the bandwidth by which the path got its share of the stripes; None for a single
    path, which is not measured.
    """

    path: str
    engine: str
    direct: bool
    read: DirectionStatus = field(default_factory=DirectionStatus)
    written: DirectionStatus = field(default_factory=DirectionStatus)
    queue_full_seconds: float = 0.0
    measured_bytes_per_second: Integer | None = None


@dataclass(frozen=True)
class CopyStatus:
    """Copies over the device's link in one direction since the start; rates are bytes per second.

    ``bytes`` and ``copies`` count what was begun; ``busy_seconds`` are the device's, of copies that have ended.
    """

    bytes: Integer = 0
    copies: Integer = 0
    busy_seconds: float = 0.0
    bytes_per_second: float = 0.0  # over the publisher's last window
    average_bytes_per_second: float = 0.0  # over the time with a copy under way
    peak_bytes_per_second: float = 0.0  # the most of a window, or of the average so far


Moving = TypeVar("Moving", DirectionStatus, CopyStatus)


@dataclass(frozen=True)
class LinkStatus:
    """The link between host memory and a device that has its own: ``h2d`` to the device, ``d2h`` from it.

    ``measured_bytes_per_second`` is what the slower of the two ways can do, if ``tiering plan --measure`` has found it.
    """

    h2d: CopyStatus = field(default_factory=CopyStatus)
    d2h: CopyStatus = field(default_factory=CopyStatus)
    measured_bytes_per_second: Integer | None = None


@dataclass(frozen=True)
class IoEngineStatus:
    """The I/O engine in use and what it really uses ("registered_buffers", "verify"), and why not more.

    ``passed_over`` says why an engine, or a registration, was not to be had; ``registered_bytes`` is memory known to
    the kernel.
    """

    name: str
    flags: list[str] = field(default_factory=list)
    registered_bytes: Integer = 0
    passed_over: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveStatus:
    """Collectives of one ``kind`` ("all-gather", "reduce", "control") since the start, and bytes sent in them.

    What waiting for them costs is among the stalls.
    """

    kind: str
    calls: Integer = 0
    sent_bytes: Integer = 0
    sent_bytes_per_second: float = 0.0  # over the publisher's last window


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step: seconds in all and by phase, seconds stalled, bytes that moved.

    They were read from NVMe, written to it, sent to other ranks, copied to the device and from it. ``stalls`` splits
    ``stall`` by cause; ``ended_at`` is Unix time. On a device with memory of its own phases are the program's, which
    runs ahead of it, and what the device did a moment late is in the next step.
    """

    step: Integer
    seconds: float
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    stall: float = 0.0
    read_bytes: Integer = 0
    written_bytes: Integer = 0
    sent_bytes: Integer = 0
    stalls: dict[str, float] = field(default_factory=dict)
    ended_at: float = 0.0
    h2d_bytes: Integer = 0
    d2h_bytes: Integer = 0


@dataclass(frozen=True)
class CheckpointStatus:
    """Saves of a rank: whether one is ``under_way`` now, how many ended well or not, and the last of them.

    ``path`` is where that last one is; ``seconds`` passed from its beginning, ``stalled`` of them while training stood
    still; ``nbytes`` are those of this rank's files; ``error`` is empty unless it failed. None before the first.
    """

    under_way: bool = False
    saved: Integer = 0
    failed: Integer = 0
    path: str | None = None
    ended_at: float | None = None  # Unix time
    seconds: float | None = None
    stalled: float | None = None
    nbytes: Integer | None = None
    error: str = ""


@dataclass(frozen=True)
class EndStatus:
    """How the run of a rank has ended.

    finished   its program closed the engine, or came to its end
    failed     by an error: ``code`` is that of our errors ("TIER-IO"), or the type of another one ("KeyError"), and
               ``text`` its message
    preempted  it was asked to stop: ``code`` is the name of the signal

    ``rank`` is the one that the failure began with, which may be another one.
    """

    how: Literal["finished", "failed", "preempted"]
    code: str = ""
    text: str = ""
    rank: Integer = 0

    @property
    def reason(self) -> str:
        """Code and text: "TIER-IO: swap_in of ... failed", "SIGTERM"; empty where it has finished."""
        return ": ".join(filter(None, (self.code, self.text)))

    @property
    def words(self) -> str:
        """It in a sentence about a rank: "has failed: TIER-IO: swap_in of ... failed"."""
        verb = {"failed": "has failed: ", "preempted": "has been stopped: ", "finished": "has finished"}[
            self.how
        ]
        return verb + self.reason


@dataclass(frozen=True)
class Snapshot:
    """What a rank publishes again and again. Counters are cumulative; ``started_at`` is Unix time in seconds.

    ``run_id`` is the same on all ranks of one start, and of no other; ``local_world_size`` counts those on ``node``.
    ``step``, ``samples`` (of all ranks) and ``skipped_steps`` count since the start, ``global_step`` goes on from a
    checkpoint. ``phase_seconds`` has "idle", too: what the program does between the phases since the first forward;
    ``phase_since`` is Unix time. ``broken`` says why training cannot go on, and is empty while it can.
    ``learning_rate`` is that of the first param group in the next step; ``loss_scale``
    None where nothing is scaled.
    ``stalls`` maps a cause to the seconds that compute waited for it, ``stalls_by_phase`` splits that by the phase in
    which the wait began. Compute is the CPU's, or where a GPU is the device, the GPU's: then they are seconds in which
    it stood still, whatever the CPU did meanwhile. ``steps`` holds the most recent 32, oldest first. ``activations``
    are counted in the first backward alone where no group moves. ``device_memory`` and ``link`` are None where the
    device is the CPU. ``ended`` is None until the run of the rank is over: then it is in the last snapshot of its page.
    """

    run_name: str
    rank: Integer
    world_size: Integer
    pid: Integer
    started_at: float
    step: Integer = 0
    phase: Phase = "start"
    loss: Diverging | None = None
    run_id: str = ""
    node: str = ""
    local_rank: Integer = 0
    local_world_size: Integer = 1
    global_step: Integer = 0
    phase_since: float = 0.0
    broken: str = ""
    samples: Integer = 0
    skipped_steps: Integer = 0
    gradient_norm: Diverging | None = None
    learning_rate: Diverging | None = None
    loss_scale: Diverging | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    tiers: list[TierStatus] = field(default_factory=list)
    activations: ActivationStatus | None = None
    device_memory: DeviceMemoryStatus | None = None
    io: list[PathStatus] = field(default_factory=list)
    io_engine: IoEngineStatus | None = None
    link: LinkStatus | None = None
    collectives: list[CollectiveStatus] = field(default_factory=list)
    stalls: dict[str, float] = field(default_factory=dict)
    stalls_by_phase: dict[str, dict[str, float]] = field(default_factory=dict)
    checkpoint: CheckpointStatus | None = None
    ended: EndStatus | None = None
    steps: list[StepRecord] = field(default_factory=list)

    # A diverged loss is worth seeing: NaN travels as NaN, not as null. Anywhere else it is damage.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants", allow_inf_nan=False)

    def to_json(self) -> str:
        """The snapshot as JSON text; infinities and NaN are written as the bare constants, as Python does."""
        return _SNAPSHOT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Inverse of ``to_json``; fields this version does not know are dropped. Raises ValueError."""
        return _SNAPSHOT.validate_json(text)


_SNAPSHOT = TypeAdapter(Snapshot)


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
