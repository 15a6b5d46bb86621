"""Examples in /openapi.json: the responses to one View, which is defined here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from service.health import Alive, Health, ready
from service.history import HistoryEntry, TierName
from service.responses.by_rank import bandwidth, config, curve, steps, tiers
from service.responses.history import history
from service.responses.plan import plan
from service.responses.readings import readings
from service.responses.status import ended_run, runs, status
from service.view import RankView, RunView, View
from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    CopyStatus,
    Description,
    DeviceMemoryStatus,
    DirectionStatus,
    EndStatus,
    GpuStatus,
    IoEngineStatus,
    LatencyStatus,
    LinkStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
    TrainingCurve,
)

MIB, GIB = 1 << 20, 1 << 30
TAKEN_AT = 1_790_000_000.0
DIRECTORY = "/run/user/1000/tiering"


def example_responses() -> dict[str, BaseModel]:
    """The response to the example of every path that returns JSON, by path."""
    view = example()
    readiness = ready(view)
    overview = status(view, lambda _: _entries()[-1])
    return {
        "/v1/status": overview,
        "/v1/runs": runs(overview, [ended_run(_before(view))]),
        "/v1/runs/{run_id}": overview.runs[0],
        "/v1/readings": readings(view),
        "/v1/tiers": tiers(view),
        "/v1/bandwidth": bandwidth(view),
        "/v1/steps": steps(view),
        "/v1/curve": curve(view),
        "/v1/config": config(view),
        "/v1/plan": plan(view),
        "/v1/history": history(view, None, lambda _: _entries()),
        "/livez": Alive(),
        "/readyz": readiness,
        "/healthz": Health(
            **readiness.model_dump(),
            version="0.1.0",
            started_at=TAKEN_AT - 7200,
            uptime=7200.0,
            directory=DIRECTORY,
            directory_problem=None,
            last_reading_at=TAKEN_AT,
            readings=28_500,
            subscribers=1,
        ),
    }


def with_examples(app: FastAPI) -> None:
    """Add ``example_responses()`` to the schema of ``app`` when it is first requested."""
    without_examples: Callable[[], dict[str, Any]] = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        schema = without_examples()
        for path, response in example_responses().items():
            content = schema["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
            content["example"] = response.model_dump(mode="json")
        return schema

    # FastAPI documents this assignment to extend the schema.
    app.openapi = openapi  # type: ignore[method-assign]


def example() -> View:
    """A run with two ranks, each on its own node, a minute after its start: one rank is on this node."""
    rank = RankView(0, "live", "", 0.125, _snapshot(), _description(), TAKEN_AT - 0.125)
    return View(
        TAKEN_AT,
        (RunView("gpt-1b-5f3a9c20", "gpt-1b", (rank,), "train"),),
        DIRECTORY,
        readings=28_500,
        changes=240,
    )


def _before(view: View) -> RunView:
    """The previous run, which finished."""
    (run,) = view.runs
    snapshot = replace(_snapshot(), ended=EndStatus("finished"))
    rank = replace(run.ranks[0], state="stale", snapshot=snapshot, published_at=TAKEN_AT - 600)
    return replace(run, id="gpt-1b-04c1d2e3", ranks=(rank,))


def _snapshot() -> Snapshot:
    return Snapshot(
        run_name="gpt-1b",
        run_id="gpt-1b-5f3a9c20",
        rank=0,
        world_size=2,
        local_world_size=1,
        node="node-a",
        pid=4242,
        started_at=TAKEN_AT - 60,
        step=20,
        global_step=20,
        phase="backward",
        loss=6.25,
        samples=320,
        tokens=327_680,
        flops=2.2e15,
        peak_flops=165.2e12,
        gradient_norm=1.5,
        learning_rate=1e-4,
        phase_seconds={"forward": 12.0, "backward": 24.0, "step": 18.0},
        tiers=[
            TierStatus("device", 8 * GIB, 24 * GIB, 6 * GIB, 7 * GIB, {"parameters": 6 * GIB}, 9 * GIB),
            TierStatus("host", 4 * GIB, 64 * GIB, 3 * GIB, 4 * GIB, {"optimizer state": 3 * GIB}, 40 * GIB),
            TierStatus(
                "nvme", 12 * GIB, 900 * GIB, 9 * GIB, 9 * GIB, {"optimizer state": 9 * GIB}, 700 * GIB
            ),
        ],
        activations=ActivationStatus(256 * MIB, 768 * MIB, moved=80 * GIB, read=40 * GIB, written=40 * GIB),
        device_memory=DeviceMemoryStatus(8 * GIB, 12 * GIB, 14 * GIB),
        gpu=GpuStatus(0.87, 310.5, 64.0),
        io=[
            PathStatus(
                "/nvme/swap",
                "io_uring",
                True,
                _direction(180 * GIB, 2.5e9, 3.1e9),
                _direction(170 * GIB, 1.25e9, 1.75e9),
                queue_full_seconds=2.5,
            )
        ],
        io_engine=IoEngineStatus("io_uring", ["registered_buffers"], 512 * MIB),
        link=LinkStatus(_copies(120 * GIB, 24e9), _copies(40 * GIB, 25e9), 26_000_000_000),
        collectives=[CollectiveStatus("all-gather", 960, 40 * GIB, 2e8)],
        stalls={"optimizer state": 8.0, "staging": 3.0, "copies of parameters": 1.0},
        stalls_by_phase={
            "forward": {"copies of parameters": 1.0},
            "step": {"optimizer state": 8.0, "staging": 3.0},
        },
        steps=[_step(19), _step(20)],
        curve=TrainingCurve(
            stride=10,
            step=[10, 20],
            ended_at=[TAKEN_AT - 30.5, TAKEN_AT - 2.8],
            seconds=[2.8, 2.75],
            tokens=[16_384.0, 16_384.0],
            loss=[8.5, 6.5],
            highest_loss=[11.0, 7.0],
            gradient_norm=[2.5, 1.6],
            highest_gradient_norm=[4.0, 1.9],
        ),
    )


def _direction(moved: int, average: float, peak: float) -> DirectionStatus:
    return DirectionStatus(
        bytes=moved,
        ops=moved // MIB,
        in_flight=16,
        busy_seconds=moved / average,
        bytes_per_second=average,
        average_bytes_per_second=average,
        peak_bytes_per_second=peak,
        latency_buckets=[0] * 21 + [moved // MIB],
        latency_seconds=moved / MIB * 0.003,
        latency=LatencyStatus(0.0029, 0.0035, 0.0040, 0.0042, 0.0042),
    )


def _copies(moved: int, average: float) -> CopyStatus:
    return CopyStatus(
        bytes=moved,
        copies=moved // (256 * MIB),
        busy_seconds=moved / average,
        bytes_per_second=average / 8,
        average_bytes_per_second=average,
        peak_bytes_per_second=average / 2,
    )


def _step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        seconds=2.75,
        forward=0.6,
        backward=1.2,
        update=0.9,
        stall=0.6,
        read_bytes=11 * GIB,
        written_bytes=11 * GIB,
        sent_bytes=2 * GIB,
        stalls={"optimizer state": 0.4, "staging": 0.15, "copies of parameters": 0.05},
        ended_at=TAKEN_AT - 2.75 * (21 - step),
        h2d_bytes=6 * GIB,
        d2h_bytes=2 * GIB,
        activation_bytes=4 * GIB,
        activation_read_bytes=2 * GIB,
        activation_written_bytes=2 * GIB,
        tokens=16_384,
        flops=1.1e14,
    )


def _description() -> Description:
    return Description(
        device="cuda:0 NVIDIA RTX 4090",
        versions={"tiering": "0.1.0", "torch": "2.13.0", "python": "3.12.3"},
        configuration=ConfigurationStatus(
            "ds_config.json",
            "batch 16 = 8 x 1 x 2 ranks, bf16",
            {"honoured": 4, "no effect": 1},
            ["zero_optimization.allgather_bucket_size"],
            settings=[
                SettingStatus("zero_optimization.stage", 3, "file", "honoured"),
                SettingStatus("tiering.host_budget", 4 * GIB, "file", "honoured"),
                SettingStatus("optimizer.params.lr", 1e-4, "auto", "honoured"),
                SettingStatus("gradient_clipping", 0.0, "default"),
            ],
        ),
        links={"Weights & Biases": "https://wandb.ai/team/llm/runs/5f3a9c20"},
        plan=PlanStatus(
            tiers=[
                PlannedTier("device", 8 * GIB, 7 * GIB, {"parameters": 7 * GIB}),
                PlannedTier("host", 4 * GIB, 4 * GIB, {"optimizer state": 3 * GIB, "staging": GIB}),
                PlannedTier("nvme", 12 * GIB, 9 * GIB, {"optimizer state": 9 * GIB}),
            ],
            read={"optimizer state": 9 * GIB},
            written={"optimizer state": 9 * GIB},
            sent={"parameters": 2 * GIB},
            groups=26,
            parameters=1_100_000_000,
            state_format="fp32",
        ),
    )


def _entries() -> list[HistoryEntry]:
    used: dict[TierName, int | None] = {"device": 6 * GIB, "host": 3 * GIB, "nvme": 9 * GIB}
    return [
        HistoryEntry(TAKEN_AT - 1, 19, None, None, None, None, used),
        HistoryEntry(TAKEN_AT, 20, 2.5e9, 1.25e9, 2e8, 0.25, used, 2.2e9, 0.7e9),
    ]
