"""Runs for the tests of advice: a healthy one, and what differs from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from service.advice import Advice, advise
from service.view import RankView, RunView
from tiering.telemetry import (
    ConfigurationStatus,
    CopyStatus,
    Description,
    DirectionStatus,
    LinkStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

GIB = 1 << 30
GB = 10**9


def steps(*seconds: float, stall: float = 0.0, **stalls: float) -> list[StepRecord]:
    """Steps from number 2 on, ``stall`` of each stalled: by causes whose underscores are spaces, as shares."""
    return [
        StepRecord(
            number,
            took,
            forward=0.3 * took,
            backward=0.3 * took,
            update=0.4 * took,
            stall=stall * took,
            read_bytes=8 * GB,
            written_bytes=6 * GB,
            stalls={cause.replace("_", " "): part * took for cause, part in stalls.items()},
        )
        for number, took in enumerate(seconds, 2)
    ]


def path(name: str = "/nvme", read: DirectionStatus | None = None, **more: Any) -> PathStatus:
    read = read or DirectionStatus(8 * GB, 1000, average_bytes_per_second=2e9)
    return PathStatus(
        name, "io_uring", True, read, DirectionStatus(6 * GB, 1000, average_bytes_per_second=1e9), **more
    )


# 2 GiB of state on NVMe that 10 GiB of free memory could hold, and a step that does not wait for it.
PLAN = PlanStatus(
    [
        PlannedTier("host", 4 * GIB, 4 * GIB, {"parameters": 3 * GIB, "staging": GIB // 8}),
        PlannedTier("nvme", 99 * GIB, 2 * GIB, {"optimizer state": 2 * GIB}),
    ],
    read={"optimizer state": 2 * GIB},
    written={"optimizer state": 2 * GIB},
    host_without_nvme=6 * GIB,
)
HOST = TierStatus("host", 4 * GIB, 20 * GIB, 4 * GIB, 4 * GIB, available=10 * GIB)
DISK = TierStatus("nvme", 99 * GIB, 100 * GIB, 2 * GIB, 2 * GIB, available=50 * GIB)
BASE = Snapshot(
    "gpt",
    0,
    1,
    4321,
    1.0,
    step=12,
    loss=3.5,
    tiers=[HOST, DISK],
    io=[path()],
    steps=steps(*[1.0] * 11, stall=0.1),
)
DESCRIBED = Description("cpu", plan=PLAN)


def rank(figures: Snapshot = BASE, described: Description | None = DESCRIBED, **more: Any) -> RankView:
    return replace(RankView(figures.rank, "live", "", 0.1, figures, described), **more)


def of(*ranks: RankView) -> list[Advice]:
    return advise(RunView("gpt-1", "gpt", ranks))


def live(**changes: Any) -> list[RankView]:
    return [rank(replace(BASE, **changes))]


def two(**changes: Any) -> list[RankView]:
    """Rank 1 differs."""
    both = replace(BASE, world_size=2, local_world_size=2)
    return [rank(both), rank(replace(both, rank=1, **changes))]


def each(**changes: Any) -> list[RankView]:
    """Both ranks alike."""
    both = replace(BASE, **{"world_size": 2, "local_world_size": 2, **changes})
    return [rank(both), rank(replace(both, rank=1))]


def read(**counted: Any) -> dict[str, Any]:
    return {"io": [path(read=DirectionStatus(8 * GB, 1000, average_bytes_per_second=2e9, **counted))]}


def configured(*settings: SettingStatus, **more: Any) -> list[RankView]:
    configuration = ConfigurationStatus("ds.json", "", settings=list(settings), **more)
    return [rank(described=replace(DESCRIBED, configuration=configuration))]


def planned_as(host: int, budget: int) -> list[RankView]:
    plan = replace(PLAN, tiers=[PlannedTier("host", budget, host)])
    setting = SettingStatus("tiering.host_budget", budget, "file")
    configuration = ConfigurationStatus("ds.json", "", settings=[setting])
    return [rank(described=Description("cpu", plan=plan, configuration=configuration))]


def slow_of_two(rate: float, recent: int | None = None) -> list[RankView]:
    """The second path has this rate on average, and that of ``recent`` steps."""
    slow = DirectionStatus(8 * GB, 1000, average_bytes_per_second=rate)
    second = path("/b", slow, measured_bytes_per_second=2 * GB, recent_bytes_per_second=recent)
    first = path("/a", measured_bytes_per_second=2 * GB, recent_bytes_per_second=recent and 2 * GB)
    return live(io=[first, replace(second, written=slow)])


def on_gpu(
    h2d: float = 8e9,
    d2h: float = 10e9,
    free: int = 30 * GIB,
    ranks: int = 1,
    measured: int | None = None,
    where: str = "nvme",
    **waited: float,
) -> list[RankView]:
    """A GPU without NVMe: each step of a second copies 6 GB there and 2 GB back, at rates like these.

    It is in the phase step for 400 ms of it, of which ``updating`` is no stall; ``where`` the plan has the state.
    """
    updating = waited.pop("updating", 0.0)
    plan = replace(PLAN, tiers=[PlannedTier(where, 4 * GIB, GIB, {"optimizer state": GIB})])
    device = TierStatus("device", 20 * GIB, 80 * GIB, 20 * GIB, 20 * GIB, available=free)
    copied = [replace(step, h2d_bytes=6 * GB, d2h_bytes=2 * GB) for step in steps(*[1.0] * 3, **waited)]
    link = LinkStatus(
        CopyStatus(average_bytes_per_second=h2d), CopyStatus(average_bytes_per_second=d2h), measured
    )
    both = replace(BASE, io=[], tiers=[device, HOST], link=link, steps=copied, local_world_size=ranks)
    both = replace(both, phase_seconds={"step": 1.2}, stalls_by_phase={"step": {"any": 1.2 - 3 * updating}})
    described = replace(DESCRIBED, plan=plan)
    return [rank(replace(both, rank=number, world_size=ranks), described) for number in range(ranks)]


# parts of a step
bound = {"stall": 0.71, "optimizer_state": 0.6, "staging": 0.11}
copying = {"stall": 0.6, "copies_of_parameters": 0.55, "gradients": 0.02, "reduce": 0.03}
waiting = {"stall": 0.4, "gather": 0.3, "agreement": 0.1}
