"""A View in which every metric has something to tell."""

from __future__ import annotations

from dataclasses import replace

from service.view import Node, RankView, RunView, View
from tiering.telemetry import (
    ActivationStatus,
    CheckpointStatus,
    CollectiveStatus,
    ConfigurationStatus,
    CopyStatus,
    Description,
    DeviceMemoryStatus,
    DirectionStatus,
    DriveStatus,
    EndStatus,
    GpuStatus,
    IoEngineStatus,
    LinkStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

MIB = 1 << 20
READ = DirectionStatus(
    500 * MIB, 400, 2, 1, 0, 3, 0.5, latency_buckets=[0] * 18 + [300, 100], latency_seconds=0.25
)
WRITTEN = DirectionStatus(
    400 * MIB,
    300,
    0,
    0,
    3,
    1,
    0.4,
    errors_by_errno={"EIO": 2, "ENOSPC": 1},
    latency_buckets=[5] + [0] * 39 + [7],
)
SNAPSHOT = Snapshot(
    run_name="gpt 25M",
    rank=0,
    world_size=4,
    pid=4321,
    started_at=1_700_000_000.5,
    step=12,
    phase="step",
    loss=3.5,
    run_id="gpt-1a2b3c4d",
    node="node7",
    local_world_size=2,
    global_step=112,
    samples=96,
    tokens=9600,
    flops=9.6e12,
    peak_flops=8e11,
    skipped_steps=1,
    global_skipped_steps=5,
    gradient_norm=0.75,
    learning_rate=1e-3,
    loss_scale=65536.0,
    phase_seconds={"forward": 3.0, "backward": 6.0, "step": 3.0, "idle": 1.0},
    tiers=[
        TierStatus("device", 96 * MIB, 1024 * MIB, 60 * MIB, 90 * MIB, {"parameters": 60 * MIB}, 512 * MIB),
        TierStatus(
            "host",
            96 * MIB,
            4096 * MIB,
            60 * MIB,
            90 * MIB,
            {"gradients": 48 * MIB, "activations": 12 * MIB},
            2048 * MIB,
        ),
        TierStatus(
            "nvme", 900 * MIB, 9999 * MIB, 400 * MIB, 400 * MIB, {"optimizer state": 400 * MIB}, 100 * MIB
        ),
    ],
    activations=ActivationStatus(3 * MIB, 7 * MIB, moved=60 * MIB, read=40 * MIB, written=44 * MIB),
    device_memory=DeviceMemoryStatus(70 * MIB, 95 * MIB, 128 * MIB),
    gpu=GpuStatus(0.75, 350.5, 61.0),
    io=[
        PathStatus(
            "/nvme/swap",
            "io_uring",
            True,
            READ,
            WRITTEN,
            0.3,
            10**9,
            4 * 10**8,
            0.45,
            DriveStatus(0.25, 10**14, 4e14),
        )
    ],
    io_engine=IoEngineStatus("io_uring", ["verify", "registered_buffers"], 8 * MIB),
    link=LinkStatus(CopyStatus(900 * MIB, 60, 0.0625), CopyStatus(300 * MIB, 20, 0.03125), 5 * 10**10),
    collectives=[CollectiveStatus("all-gather", 40, 80 * MIB)],
    stalls={"parameters": 0.5, "gather": 0.25, "copies of parameters": 0.75},
    stalls_by_phase={
        "forward": {"parameters": 0.5, "gather": 0.25},
        "backward": {"copies of parameters": 0.75},
    },
    checkpoint=CheckpointStatus(True, 2, 1, "/checkpoints/40", 1_700_000_700.0, 4.0, 0.5, 300 * MIB),
    steps=[
        StepRecord(11, 1.0, stall=0.125, ended_at=1_700_000_800.0, tokens=800, flops=8e11),
        StepRecord(12, 3.0, stall=0.375, ended_at=1_700_000_803.0, tokens=800, flops=8e11),
    ],
)
DESCRIPTION = Description(
    device="cuda:0 NVIDIA H200",
    # The last two are of a damaged file.
    labels={"job_id": "77", "team": "vision", "run": "another", "not valid": "x"},
    versions={"tiering": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "linux": "6.18"},
    configuration=ConfigurationStatus("ds.json", "batch 8", without_effect=["a.b", "c"], deprecated=["d"]),
    plan=PlanStatus(
        [
            PlannedTier("device", 96 * MIB, 60 * MIB, {"parameters": 60 * MIB}),
            PlannedTier("host", 96 * MIB, 70 * MIB, {"gradients": 60 * MIB, "staging": 10 * MIB}),
            PlannedTier("nvme", 900 * MIB, 400 * MIB, {"optimizer state": 400 * MIB}),
        ],
        read={"optimizer state": 40 * MIB},
        written={"optimizer state": 30 * MIB},
        sent={"gradients": 20 * MIB},
    ),
)
FIRST = RankView(0, "live", "", 0.125, SNAPSHOT, DESCRIPTION)
SECOND = replace(
    FIRST, rank=1, snapshot=replace(SNAPSHOT, rank=1), state="silent", heartbeat_age=14.0, reason="alive"
)
OLD = Snapshot("old", 0, 1, 4322, 1_700_000_000.0, 9, run_id="old-1", ended=EndStatus("preempted", "SIGTERM"))
FULL = View(
    1_700_000_804.0,
    (RunView("gpt-1a2b3c4d", "gpt 25M", (FIRST, SECOND), "train"),),
    readings=7,
    closed=(RunView("old-1", "old", (RankView(0, "stale", "has been stopped", 1.0, OLD),)),),
    nodes=(Node("node7:8471", "", 1_700_000_803.0, 2),),
)
