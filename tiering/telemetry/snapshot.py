"""The snapshot that a rank publishes: frozen records, and their JSON form.

Each field is declared here, or in transfer_status.py, with its Figure, from which the HTTP API, the metrics and their
documentation are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from tiering.telemetry.figure import Diverging, Figure, Integer, Label
from tiering.telemetry.step_record import StepRecord
from tiering.telemetry.training_curve import TrainingCurve
from tiering.telemetry.transfer_status import CollectiveStatus, IoEngineStatus, LinkStatus, PathStatus

Phase = Literal["start", "forward", "backward", "step", "idle"]
# Prefix of each stall cause of the device's link. The other causes are of NVMe or of other ranks.
COPIES_OF = "copies of "


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
            "Maximum of the bytes that the rank has used on the tier since the start.",
            "tiering_tier_peak_bytes",
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
            "Free bytes of the tier now; all ranks of a node share them. Absent if unknown.",
            "tiering_tier_available_bytes",
        ),
    ] = None


_SWAPPED = Figure(
    "Bytes of activations that were written to NVMe, or read from it, since the start.",
    "tiering_activation_swapped_bytes_total",
)


@dataclass(frozen=True)
class ActivationStatus:
    """Bytes that autograd keeps for backward: outside the tiers, and those that were moved to host memory and NVMe.

    The bytes that are on these tiers now are in their ``by_kind``, as "activations".
    """

    used: Annotated[
        Integer,
        Figure("Bytes that autograd keeps for backward, outside the tiers.", "tiering_activation_bytes"),
    ]
    peak: Annotated[
        Integer,
        Figure(
            "Maximum of the bytes that autograd has kept for backward since the start.",
            "tiering_activation_peak_bytes",
        ),
    ]
    moved: Annotated[
        Integer,
        Figure(
            "Bytes of activations that were moved off the device since the start.",
            "tiering_activation_moved_bytes_total",
        ),
    ] = 0
    read: Annotated[Integer, _SWAPPED, Label("direction", "read")] = 0
    written: Annotated[Integer, _SWAPPED, Label("direction", "write")] = 0


@dataclass(frozen=True)
class DeviceMemoryStatus:
    """GPU memory of torch, in bytes, including the device tier."""

    allocated: Annotated[
        Integer,
        Figure(
            "Bytes of GPU memory in torch's tensors, including the device tier; absent on a CPU.",
            "tiering_device_memory_allocated_bytes",
        ),
    ]
    peak: Annotated[
        Integer,
        Figure(
            "Maximum of the bytes of GPU memory in torch's tensors since the start, or since the program called"
            " torch.cuda.reset_peak_memory_stats.",
            "tiering_device_memory_peak_bytes",
        ),
    ]
    reserved: Annotated[
        Integer,
        Figure(
            "Bytes of GPU memory that torch has allocated from the driver, including its cache.",
            "tiering_device_memory_reserved_bytes",
        ),
    ]


@dataclass(frozen=True)
class GpuStatus:
    """Sensors of the rank's GPU, from NVML; other processes on the GPU count too. None: the GPU does not have it."""

    utilization: Annotated[
        float | None,
        Figure(
            "Share of the last second in which a kernel ran on the GPU, 0 to 1, from NVML; absent without it.",
            "tiering_gpu_utilization_ratio",
        ),
    ] = None
    power: Annotated[
        float | None,
        Figure("Power of the GPU in watts, from NVML; absent without it.", "tiering_gpu_power_watts"),
    ] = None
    temperature: Annotated[
        float | None,
        Figure(
            "Temperature of the GPU in degrees Celsius, from NVML; absent without it.",
            "tiering_gpu_temperature_celsius",
        ),
    ] = None


_SAVES = Figure(
    "Saves of checkpoints that have ended on the rank since the start, by outcome.",
    "tiering_checkpoints_total",
)


@dataclass(frozen=True)
class CheckpointStatus:
    """Saves of a rank: whether one is in progress (``under_way``), how many succeeded and failed, and the last one.

    ``path`` is the directory of the last save, None before the first; ``error`` is empty unless it failed.
    """

    under_way: Annotated[
        bool,
        Figure("1 while the rank saves a checkpoint, else 0.", "tiering_checkpoint_under_way"),
    ] = False
    saved: Annotated[Integer, _SAVES, Label("outcome", "saved")] = 0
    failed: Annotated[Integer, _SAVES, Label("outcome", "failed")] = 0
    path: str | None = None
    ended_at: Annotated[
        float | None,
        Figure(
            "Unix time at which the last save succeeded or failed.",
            "tiering_checkpoint_last_timestamp_seconds",
        ),
    ] = None
    seconds: Annotated[
        float | None,
        Figure("Duration of the last save in seconds.", "tiering_checkpoint_last_duration_seconds"),
    ] = None
    stalled: Annotated[
        float | None,
        Figure(
            "Seconds for which the last save blocked training.",
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

    finished   the program closed the engine, or ended without an error
    failed     an error ended it: ``code`` is the code of a tiering error ("TIER-IO") or the type of another exception
               ("KeyError"), and ``text`` its message
    preempted  a signal requested the stop: ``code`` is the name of the signal

    ``rank`` is the rank where the failure began.
    """

    how: Literal["finished", "failed", "preempted"]
    code: str = ""
    text: str = ""
    rank: Integer = 0

    @property
    def reason(self) -> str:
        """Code and text: "TIER-IO: swap_in of ... failed", "SIGTERM"; empty for a finished run."""
        return ": ".join(filter(None, (self.code, self.text)))

    @property
    def summary(self) -> str:
        """The predicate of a sentence about the rank: "has failed: TIER-IO: swap_in of ... failed"."""
        verb = {"failed": "has failed: ", "preempted": "has been stopped: ", "finished": "has finished"}[
            self.how
        ]
        return verb + self.reason


@dataclass(frozen=True)
class Snapshot:
    """The state of a rank at one publication. Counters are cumulative.

    ``run_id`` is equal on all ranks of one start, and unique to it; ``local_world_size`` is the number of ranks on
    ``node``. With a GPU, seconds by phase and stalls are measured on the GPU. If no group moves, ``activations`` are
    counted in the first backward only. ``ended`` is None until the run of the rank is over; the last snapshot of the
    status file then has it.
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
    phase: Annotated[Phase, Figure("Current phase of the rank.")] = "start"
    loss: Annotated[
        Diverging | None,
        Figure(
            "Loss of the last micro-batch in the last step, the mean over all ranks; NaN or infinite if training"
            " diverged, absent if neither engine.backward() nor engine.scale() received it.",
            "tiering_loss",
        ),
    ] = None
    run_id: str = ""
    node: Annotated[str, Figure("Host name of the rank's node.")] = ""
    local_rank: Annotated[Integer, Figure("Index of the rank on its node.")] = 0
    local_world_size: Integer = 1
    mesh: Annotated[
        dict[str, Integer], Figure("Place of the rank in each dimension of its mesh; empty without a mesh.")
    ] = field(default_factory=dict)
    global_step: Annotated[
        Integer,
        Figure(
            "Optimizer steps of the run, including the steps before the checkpoint that it resumed from.",
            "tiering_global_step",
        ),
    ] = 0
    phase_since: Annotated[float, Figure("Unix time at which the phase began.")] = 0.0
    broken: Annotated[str, Figure("Error that prevents further training; empty without one.")] = ""
    samples: Annotated[
        Integer,
        Figure(
            "Samples of all ranks in finished steps since the start; equal on all ranks.",
            "tiering_samples_total",
        ),
    ] = 0
    tokens: Annotated[
        Integer,
        Figure(
            "Tokens of the rank's forwards in training since the start, padding included; 0 if its inputs have none.",
            "tiering_tokens_total",
        ),
    ] = 0
    flops: Annotated[
        float,
        Figure(
            "Floating-point operations of the model for these tokens, forward and backward, each counted once; 0 if"
            " unknown.",
            "tiering_model_flops_total",
        ),
    ] = 0.0
    peak_flops: Annotated[
        float | None,
        Figure(
            "Floating-point operations per second of the GPU in the compute dtype, from its data sheet; absent if"
            " unknown.",
            "tiering_device_peak_flops",
        ),
    ] = None
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
            "Skipped steps of the run, including the steps before the checkpoint that it resumed from.",
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
        Figure("Factor of the loss scaling; absent without loss scaling.", "tiering_loss_scale"),
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
        ActivationStatus | None, Figure("Bytes that autograd keeps for backward, outside the tiers.")
    ] = None
    device_memory: Annotated[DeviceMemoryStatus | None, Figure("GPU memory of torch; absent on a CPU.")] = (
        None
    )
    gpu: Annotated[GpuStatus | None, Figure("Sensors of the GPU; absent on a CPU and without NVML.")] = None
    io: Annotated[list[PathStatus], Figure("Each swap path, in both directions.")] = field(
        default_factory=list
    )
    io_engine: Annotated[IoEngineStatus | None, Figure("The I/O engine in use; absent without swapping.")] = (
        None
    )
    link: Annotated[
        LinkStatus | None, Figure("Copies to the GPU (h2d) and from it (d2h); absent on a CPU.")
    ] = None
    collectives: Annotated[
        list[CollectiveStatus], Figure("Collectives by kind; empty with a single rank.")
    ] = field(default_factory=list)
    stalls: Annotated[
        dict[str, float],
        Figure("Seconds that compute (the GPU, if there is one) waited, by cause, since the start."),
    ] = field(default_factory=dict)
    stalls_by_phase: Annotated[
        dict[str, dict[str, float]],
        Figure(
            "Seconds that compute (the GPU, if there is one) waited, by phase and cause, since the start.",
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
    curve: Annotated[
        TrainingCurve | None,
        Figure(
            "Loss, gradient norm, duration and tokens of all steps so far; the first rank of a node has it."
        ),
    ] = None

    # A loss of NaN is written as NaN, not as null, so that readers see the divergence. In fields of other types, NaN is
    # an error.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants", allow_inf_nan=False)

    def to_json(self) -> str:
        """The snapshot as JSON text; infinities and NaN are written as bare constants, as Python's json does."""
        return _SNAPSHOT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Inverse of ``to_json``; unknown fields are dropped. Raises ValueError."""
        return _SNAPSHOT.validate_json(text)


_SNAPSHOT = TypeAdapter(Snapshot)
