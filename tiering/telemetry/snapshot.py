"""What a rank publishes about itself: frozen records, and their JSON form.

A field is declared here, with its Figure: answers, metrics and their documentation are made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import AllowInfNan, ConfigDict, Field, TypeAdapter, WithJsonSchema

from tiering.telemetry.figure import Figure, Label

RECENT_STEPS = 32  # in a snapshot
Phase = Literal["start", "forward", "backward", "step", "idle"]
COPIES_OF = (
    "copies of "  # begins each cause of a stall for the device's link; others are of NVMe or of other ranks
)

Integer = Annotated[
    int, Field(ge=-(1 << 63), lt=1 << 63), WithJsonSchema({"type": "integer", "format": "int64"})
]
"""One as C counts: what is larger is damage, and may be more than a float can hold."""

Diverging = Annotated[
    float,
    AllowInfNan(True),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]
"""A number that training gives: it may be infinite, or none."""


@dataclass(frozen=True)
class TierStatus:
    """One tier of one rank, in bytes."""

    name: Annotated[Literal["device", "host", "nvme"], Label("tier")]
    budget: Annotated[
        Integer, Figure("Bytes of the tier that the rank may use.", "tiering_tier_budget_bytes")
    ]
    capacity: Annotated[
        Integer,
        Figure(
            "Bytes that the tier has on this machine; all ranks of a node share them.",
            "tiering_tier_capacity_bytes",
        ),
    ]
    used: Annotated[Integer, Figure("Bytes of the tier that the rank uses.", "tiering_tier_used_bytes")]
    peak: Annotated[
        Integer,
        Figure(
            "The most bytes of the tier that the rank has used since the start.", "tiering_tier_peak_bytes"
        ),
    ]
    by_kind: Annotated[
        dict[str, Integer],
        Figure(
            "Bytes of the tier that the rank uses, by what they hold; they add up to tiering_tier_used_bytes.",
            "tiering_tier_content_bytes",
            by=("kind",),
        ),
    ] = field(default_factory=dict)
    available: Annotated[
        Integer | None,
        Figure(
            "Bytes of the tier that nobody uses now; all ranks of a node share them. Absent where not known.",
            "tiering_tier_available_bytes",
        ),
    ] = None


@dataclass(frozen=True)
class ActivationStatus:
    """Bytes that autograd keeps for backward, beside the tiers."""

    used: Annotated[
        Integer,
        Figure("Bytes that autograd keeps for backward, beside the tiers.", "tiering_activation_bytes"),
    ]
    peak: Annotated[
        Integer,
        Figure(
            "The most bytes that autograd has kept for backward since the start.",
            "tiering_activation_peak_bytes",
        ),
    ]


@dataclass(frozen=True)
class DeviceMemoryStatus:
    """Bytes that torch has on the GPU, those of the device tier among them."""

    allocated: Annotated[
        Integer,
        Figure(
            "Bytes of the GPU in torch's tensors, those of the device tier included; absent on a CPU.",
            "tiering_device_memory_allocated_bytes",
        ),
    ]
    peak: Annotated[
        Integer,
        Figure(
            "The most bytes of the GPU in torch's tensors since the start, or since the program called"
            " torch.cuda.reset_peak_memory_stats.",
            "tiering_device_memory_peak_bytes",
        ),
    ]
    reserved: Annotated[
        Integer,
        Figure(
            "Bytes of the GPU that torch has taken from the driver, those that it keeps for later included.",
            "tiering_device_memory_reserved_bytes",
        ),
    ]


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

    ``latency_buckets[i]`` counts the operations that took
    [2^i, 2^(i+1)) nanoseconds; buckets behind the last that counts are left out. ``latency_seconds`` is their sum, and
    ``latency`` comes from a finer histogram; None while nothing has moved.
    """

    bytes: Annotated[Integer, Figure("Bytes swapped since the start.", "tiering_swap_bytes_total")] = 0
    ops: Annotated[
        Integer,
        Figure(
            "Requests to the I/O engine that have ended since the start.", "tiering_swap_operations_total"
        ),
    ] = 0
    retries: Annotated[
        Integer,
        Figure(
            "Requests that were continued after a short transfer, or issued again, since the start.",
            "tiering_swap_retries_total",
        ),
    ] = 0
    errors: Annotated[
        Integer, Figure("Requests that failed since the start.", "tiering_swap_errors_total")
    ] = 0
    in_flight: Annotated[
        Integer, Figure("Requests that are with the I/O engine now.", "tiering_swap_operations_in_flight")
    ] = 0
    busy_seconds: Annotated[
        float,
        Figure(
            "Seconds with at least one transfer in flight since the start.", "tiering_swap_busy_seconds_total"
        ),
    ] = 0.0
    bytes_per_second: float = 0.0  # over the publisher's last window
    average_bytes_per_second: float = 0.0  # over the time with at least one transfer in flight
    peak_bytes_per_second: float = 0.0  # the most of a window, or of the average so far
    # Beside the sum, which is there from the start: a series that begins with an error has no increase.
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
            "Seconds in which transfers waited because the path had as many in flight as allowed, since the start.",
            "tiering_swap_queue_full_seconds_total",
        ),
    ] = 0.0
    measured_bytes_per_second: Annotated[
        Integer | None,
        Figure(
            "Bandwidth by which the path got its share of the stripes; absent where there is one path.",
            "tiering_swap_path_measured_bytes_per_second",
        ),
    ] = None


@dataclass(frozen=True)
class CopyStatus:
    """Copies over the device's link in one direction since the start; rates are bytes per second.

    ``bytes`` and ``copies`` count what was begun; ``busy_seconds`` are of copies that have ended.
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
            "Seconds with a copy under way in that direction since the start, by the GPU's clock; absent on a CPU.",
            "tiering_device_copy_busy_seconds_total",
        ),
    ] = 0.0
    bytes_per_second: float = 0.0  # over the publisher's last window
    average_bytes_per_second: float = 0.0  # over the time with a copy under way
    peak_bytes_per_second: float = 0.0  # the most of a window, or of the average so far


@dataclass(frozen=True)
class LinkStatus:
    """The link between host memory and a device that has its own: ``h2d`` to the device, ``d2h`` from it."""

    h2d: Annotated[CopyStatus, Label("direction", "h2d")] = field(default_factory=CopyStatus)
    d2h: Annotated[CopyStatus, Label("direction", "d2h")] = field(default_factory=CopyStatus)
    measured_bytes_per_second: Annotated[
        Integer | None,
        Figure(
            "Bandwidth of the slower direction of the link to the GPU, as tiering plan --measure found it; absent"
            " where it did not.",
            "tiering_device_link_measured_bytes_per_second",
        ),
    ] = None


@dataclass(frozen=True)
class IoEngineStatus:
    """The I/O engine in use and what it really uses ("registered_buffers", "verify"), and why not more.

    ``passed_over`` says why an engine, or a registration, was not to be had.
    """

    name: str
    flags: list[str] = field(default_factory=list)
    registered_bytes: Annotated[
        Integer,
        Figure(
            "Bytes of memory that the kernel knows for I/O; absent where nothing is swapped.",
            "tiering_io_registered_bytes",
        ),
    ] = 0
    passed_over: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveStatus:
    """Collectives of one ``kind`` ("all-gather", "reduce", "control") since the start, and bytes sent in them.

    What waiting for them costs is among the stalls.
    """

    kind: Annotated[str, Label("kind")]
    calls: Annotated[
        Integer,
        Figure("Collectives that the rank took part in since the start.", "tiering_collective_calls_total"),
    ] = 0
    sent_bytes: Annotated[
        Integer,
        Figure(
            "Bytes that the rank sent in collectives since the start.", "tiering_collective_sent_bytes_total"
        ),
    ] = 0
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


_SAVES = Figure(
    "Checkpoints that the rank has ended to save since the start, by how that ended.",
    "tiering_checkpoints_total",
)


@dataclass(frozen=True)
class CheckpointStatus:
    """Saves of a rank: whether one is ``under_way`` now, how many ended well or not, and the last of them.

    ``path`` is where that last one is; ``error`` is empty unless it failed. None before the first.
    """

    under_way: Annotated[
        bool,
        Figure("Whether the rank saves a checkpoint now (1), or not (0).", "tiering_checkpoint_under_way"),
    ] = False
    saved: Annotated[Integer, _SAVES, Label("outcome", "saved")] = 0
    failed: Annotated[Integer, _SAVES, Label("outcome", "failed")] = 0
    path: str | None = None
    ended_at: Annotated[
        float | None,
        Figure(
            "Unix time at which the last save ended, well or not.",
            "tiering_checkpoint_last_timestamp_seconds",
        ),
    ] = None
    seconds: Annotated[
        float | None, Figure("Seconds that the last save took.", "tiering_checkpoint_last_duration_seconds")
    ] = None
    stalled: Annotated[
        float | None,
        Figure(
            "Seconds for which training stood still in the last save.",
            "tiering_checkpoint_last_stall_seconds",
        ),
    ] = None
    nbytes: Annotated[
        Integer | None,
        Figure("Bytes of this rank's files in the last save.", "tiering_checkpoint_last_bytes"),
    ] = None
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
    """What a rank publishes again and again. Counters are cumulative.

    ``run_id`` is the same on all ranks of one start, and of no other; ``local_world_size`` counts those on ``node``.
    On a GPU, which is then what computes, seconds by phase and stalls are the GPU's, whatever the CPU did meanwhile.
    ``activations`` are counted in the first backward alone where no group moves. ``ended`` is None until the run of the
    rank is over: then it is in the last snapshot of its page.
    """

    run_name: str
    rank: Integer
    world_size: Annotated[Integer, Figure("Ranks of the run on all nodes.")]
    pid: Annotated[Integer, Figure("Process id, in the rank's own pid namespace.")]
    started_at: Annotated[
        float, Figure("Unix time at which the rank's engine was built.", "tiering_rank_start_time_seconds")
    ]
    step: Annotated[
        Integer, Figure("Optimizer steps since the start, skipped ones included.", "tiering_steps_total")
    ] = 0
    phase: Annotated[Phase, Figure("What the rank does now.")] = "start"
    loss: Annotated[
        Diverging | None,
        Figure(
            "Loss of the last micro-batch in the last step, the mean over all ranks; NaN or infinite where it"
            " diverged, absent where neither engine.backward() nor engine.scale() was given it.",
            "tiering_loss",
        ),
    ] = None
    run_id: str = ""
    node: Annotated[str, Figure("Host name of the rank's node.")] = ""
    local_rank: Annotated[Integer, Figure("Number of the rank among those of its node.")] = 0
    local_world_size: Integer = 1
    global_step: Annotated[
        Integer,
        Figure(
            "Optimizer steps of the run, those before the checkpoint that it went on from included.",
            "tiering_global_step",
        ),
    ] = 0
    phase_since: Annotated[float, Figure("Unix time at which the phase began.")] = 0.0
    broken: Annotated[str, Figure("Why training cannot go on; empty while it can.")] = ""
    samples: Annotated[
        Integer,
        Figure(
            "Samples of all ranks in finished steps since the start; every rank tells the same.",
            "tiering_samples_total",
        ),
    ] = 0
    skipped_steps: Annotated[
        Integer,
        Figure(
            "Optimizer steps that changed nothing because a gradient was not finite, since the start.",
            "tiering_skipped_steps_total",
        ),
    ] = 0
    global_skipped_steps: Annotated[
        Integer,
        Figure(
            "Skipped steps of the run, those before the checkpoint that it went on from included.",
            "tiering_global_skipped_steps",
        ),
    ] = 0
    gradient_norm: Annotated[
        Diverging | None,
        Figure("Norm of all gradients in the last step, before clipping.", "tiering_gradient_norm"),
    ] = None
    learning_rate: Annotated[
        Diverging | None,
        Figure("Learning rate of the first param group in the next step.", "tiering_learning_rate"),
    ] = None
    loss_scale: Annotated[
        Diverging | None,
        Figure("What the loss is multiplied with; absent where nothing is scaled.", "tiering_loss_scale"),
    ] = None
    phase_seconds: Annotated[
        dict[str, float],
        Figure(
            "Seconds that the rank, or its GPU, spent in each phase of a step, and idle between phases, since the"
            " start.",
            "tiering_phase_seconds_total",
            by=("phase",),
        ),
    ] = field(default_factory=dict)
    tiers: Annotated[list[TierStatus], Figure("The tiers, fastest first.")] = field(default_factory=list)
    activations: Annotated[
        ActivationStatus | None, Figure("Bytes that autograd keeps for backward, beside the tiers.")
    ] = None
    device_memory: Annotated[
        DeviceMemoryStatus | None, Figure("Bytes that torch has on the GPU; absent on a CPU.")
    ] = None
    io: Annotated[list[PathStatus], Figure("Each swap path, in both directions.")] = field(
        default_factory=list
    )
    io_engine: Annotated[
        IoEngineStatus | None, Figure("The I/O engine in use; absent where nothing is swapped.")
    ] = None
    link: Annotated[
        LinkStatus | None, Figure("Copies to the GPU (h2d) and from it (d2h); absent on a CPU.")
    ] = None
    collectives: Annotated[
        list[CollectiveStatus], Figure("Collectives by kind; empty where a rank is alone.")
    ] = field(default_factory=list)
    stalls: Annotated[
        dict[str, float],
        Figure(
            "Seconds that compute (the GPU, if there is one) waited, by what it waited for, since the start."
        ),
    ] = field(default_factory=dict)
    stalls_by_phase: Annotated[
        dict[str, dict[str, float]],
        Figure(
            "Seconds that compute (the GPU, if there is one) waited, by phase and what it waited for, since the start.",
            "tiering_stall_seconds_total",
            by=("phase", "cause"),
        ),
    ] = field(default_factory=dict)
    checkpoint: Annotated[
        CheckpointStatus | None, Figure("Saves of checkpoints; absent before the first.")
    ] = None
    ended: EndStatus | None = None
    steps: Annotated[list[StepRecord], Figure("The last 32 steps, oldest first.")] = field(
        default_factory=list
    )

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
