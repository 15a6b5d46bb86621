"""The record of one optimizer step in a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiering.telemetry.figure import Integer

# Step records in a snapshot.
RECENT_STEPS = 32


# Slots: a sidecar of many nodes has 32 of these for each rank.
@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished optimizer step: seconds in total and by phase, seconds stalled, bytes moved.

    Bytes are counted by direction: read from NVMe, written to it, sent to other ranks, copied to the device (``h2d``)
    and from it (``d2h``). Activations are in these bytes, and by themselves: moved off the device, read from NVMe, and
    written to it. ``stalls`` splits ``stall`` by cause; ``ended_at`` is Unix time. With a GPU, phases are
    measured on the CPU, which runs ahead of the GPU: work that the GPU finishes late counts in the next step.
    ``tokens`` are those of the rank, and ``flops`` the model's floating-point operations for them; 0 if unknown.
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
    activation_bytes: Integer = 0
    activation_read_bytes: Integer = 0
    activation_written_bytes: Integer = 0
    tokens: Integer = 0
    flops: float = 0.0
