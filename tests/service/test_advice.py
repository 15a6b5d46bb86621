"""Advice: each fires on a run that has it and not on its neighbour, and what it promises comes true."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiering
from service.advice import Advice, advise
from service.advice.larger_budget import larger_budget
from service.responses.status import status
from service.terminal.rendering import ASCII, rendered
from service.view import RankView, RunView, View
from service.watch import Watch
from tests.tiering.workloads import MIB, PLENTY, budgets, example, planned, workloads
from tiering.config.training import parse_size
from tiering.demo.model import GPT
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.workload import GroupSizes
from tiering.telemetry import (
    CheckpointStatus,
    ConfigurationStatus,
    CopyStatus,
    Description,
    DirectionStatus,
    IoEngineStatus,
    LinkStatus,
    PathStatus,
    PlannedTier,
    PlanStatus,
    SettingStatus,
    Snapshot,
    StepRecord,
    TierStatus,
)

from .processes import until

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


def slow_of_two(rate: float) -> list[RankView]:
    slow = DirectionStatus(8 * GB, 1000, average_bytes_per_second=rate)
    second = path("/b", slow, measured_bytes_per_second=2 * GB)
    return live(io=[path("/a", measured_bytes_per_second=2 * GB), replace(second, written=slow)])


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

# code, whether it is an error, a run that has it, its neighbour without, and what it says
CASES: list[tuple[str, list[RankView], list[RankView], str]] = [
    ("nvme-bound", live(steps=steps(*[2.0] * 3, **bound)), live(steps=steps(*[2.0] * 2, **bound)), "writes: 71 %"),
    ("nvme-bound", live(steps=steps(*[2.0] * 3, **bound)), live(steps=steps(*[2.0] * 3, stall=0.1)), "state 60 %"),
    ("nvme-bound", live(steps=steps(*[1.0] * 3, 9.0, **bound)), live(), "71 % of its 3.0 s is stall"),
    ("nvme-bound", live(steps=steps(*[2.0] * 3, stall=0.5, activations=0.5)), live(steps=steps(*[2.0] * 3)), "(activ"),
    ("link-bound", on_gpu(**copying), on_gpu(stall=0.6, gather=0.6), "bound by copies to the device: 57 % of its"),
    ("link-bound", on_gpu(**copying), live(steps=steps(*[1.0] * 3, **copying)), "(copies of parameters 55 %)"),
    ("link-bound", on_gpu(h2d=24e9, **copying), on_gpu(stall=0.1), "2.0 GB from it at 10.0 GB/s, 20 %"),
    ("link-bound", on_gpu(stall=0.3, gradients=0.3), on_gpu(stall=0.15, gradients=0.15), "the step waits for copies"),
    ("update-bound", on_gpu(updating=0.31), on_gpu(updating=0.29), "31 % of the step is the update"),
    ("update-bound", on_gpu(updating=0.4, where="host"), on_gpu(updating=0.4, where="device"), "on the CPU"),
    ("network-bound", each(steps=steps(*[1.0] * 11, **waiting)), two(), "40 % of the step"),
    ("network-bound", each(steps=steps(*[1.0] * 11, **waiting), world_size=4), each(), "40 % of the step"),
    ("network-bound", each(steps=steps(*[1.0] * 11, stall=1.0, gather=1.0)), two(), "100 % of the step"),
    ("straggler", two(steps=steps(*[1.3] * 11)), two(steps=steps(*[1.1] * 11)), "rank 1 is busy for 1.3 s"),
    ("slower-now", live(steps=steps(*[1.0] * 8, *[1.7] * 3)), live(steps=steps(*[1.0] * 9, *[2.7] * 2)), "1.7 s"),
    ("slower-now", live(steps=steps(*[0.3] * 20, *[0.5] * 11)), live(steps=steps(*[0.3] * 20, *[0.5] * 9)), "10 steps"),
    (
        "program-bound",
        live(steps=[replace(step, update=0.0) for step in BASE.steps]),
        live(steps=[replace(step, update=0.2) for step in BASE.steps]),
        "40 % of the step is outside",
    ),
    ("io-errors", live(**read(errors=2, errors_by_errno={"EIO": 2})), live(**read()), "2 reads of /nvme failed"),
    ("io-errors", live(**read(errors=1)), live(**read()), "another error"),
    ("io-retries", live(**read(retries=20)), live(**read(retries=19)), "20 retries"),
    ("io-slow-path", slow_of_two(1.1e9), slow_of_two(1.3e9), "/b reaches 1.1 GB/s"),
    ("io-buffered", live(io=[replace(path(), direct=False)]), live(), "/nvme is not opened with O_DIRECT"),
    (
        "io-passed-over",
        live(io_engine=IoEngineStatus("libaio", passed_over={"io_uring": "EPERM"})),
        live(io_engine=IoEngineStatus("io_uring")),
        "io_uring is not in use: EPERM",
    ),
    ("budget-exceeded", live(tiers=[replace(HOST, peak=4 * GIB + 1)]), live(tiers=[HOST]), "above its budget"),
    (
        "nvme-nearly-full",
        live(tiers=[replace(DISK, available=4 * GIB)]),
        live(tiers=[replace(DISK, available=5 * GIB)]),
        "4.0 GiB are free",
    ),
    (
        "host-memory-low",
        live(tiers=[replace(HOST, available=GIB // 2)]),
        live(tiers=[replace(HOST, available=GIB)]),
        "512 MiB of 20.0 GiB",
    ),
    ("budget-unused", planned_as(GIB, 3 * GIB), planned_as(2 * GIB, 3 * GIB), "does not use 2.0 GiB"),
    ("loss-not-finite", live(loss=math.nan), live(loss=1e30), "the loss is NaN"),
    ("loss-not-finite", live(loss=-math.inf), live(loss=None), "the loss is infinite"),
    ("steps-skipped", live(step=100, skipped_steps=17), live(step=100, skipped_steps=16), "17 of 100"),
    ("training-broken", live(broken="rank 3 is lost"), live(), "rank 3 is lost"),
    ("stuck", [rank(replace(BASE, phase="step", phase_since=1000.0), published_at=1060.0)],
     [rank(replace(BASE, phase="step", phase_since=1000.0), published_at=1059.0)], "step has taken 60.0 s"),
    ("stuck", [rank(replace(BASE, steps=[], phase="forward", phase_since=1000.0), published_at=1600.0)],
     [rank(replace(BASE, steps=[], phase="forward", phase_since=1000.0), published_at=1599.0)], "forward has taken 10"),
    ("stuck", [rank(replace(BASE, phase="idle", phase_since=1000.0), published_at=1600.0)],
     [rank(replace(BASE, phase="idle", phase_since=1000.0), published_at=1599.0)], "idle has taken 10 min"),
    ("stuck", [rank(replace(BASE, phase="idle", phase_since=1.0, checkpoint=CheckpointStatus(True)), published_at=9e3)],
     [rank()], "a checkpoint is being saved"),
    ("checkpoint-failed", live(checkpoint=CheckpointStatus(error="EIO")), live(checkpoint=CheckpointStatus()), "EIO"),
    ("config-without-effect", configured(without_effect=["a.b"]), configured(), "a.b"),
    ("config-deprecated", configured(deprecated=["a", "b", "c", "d"]), configured(), "are deprecated: a, b, c,"),
    ("rank-silent", [rank(state="silent", heartbeat_age=14.0), *two()[1:]], two(), "not published for 14.0 s"),
    ("rank-stale", [rank(state="stale"), *two()[1:]], [rank(state="stale"), *two()], "rank 0 is stale"),
    ("rank-newer-version", [rank(state="newer-version", snapshot=None)], [rank()], "rank 0 cannot be shown"),
    ("rank-unreadable", [rank(state="unreadable", snapshot=None)], [rank()], "rank 0 cannot be read"),
    ("rank-torn", [rank(state="torn", snapshot=None)], [rank()], "at the moment"),
    ("rank-missing", two()[1:], two(), "1 of the 2 ranks"),
    ("run-ended", [rank(state="stale")], [rank()], "after step 12"),
]  # fmt: skip


def test_a_healthy_run_needs_no_advice() -> None:
    assert of(rank()) == []
    assert of(*two()) == []


@pytest.mark.parametrize(("code", "having", "without", "says"), CASES, ids=[case[0] for case in CASES])
def test_it_fires_on_what_has_it_and_not_on_its_neighbour(
    code: str, having: list[RankView], without: list[RankView], says: str
) -> None:
    (advice,) = [advice for advice in of(*having) if advice.code == code]
    assert says in advice.text
    assert advice.remedy
    assert ("other nodes" in advice.remedy) == any(
        view.snapshot and view.snapshot.world_size > 2 for view in having
    )
    assert code not in {advice.code for advice in of(*without)}


def test_the_gravest_comes_first_and_what_ranks_say_alike_is_said_once() -> None:
    engine = IoEngineStatus("threads", passed_over={"io_uring": "EPERM"})
    both = replace(BASE, world_size=2, local_world_size=2, io_engine=engine, loss=math.nan)
    findings = of(
        rank(replace(both, io=[path("/a"), replace(path(), direct=False)])),
        rank(replace(both, rank=1)),
    )
    assert [(advice.code, advice.severity, advice.ranks) for advice in findings] == [
        ("loss-not-finite", "error", []),
        ("io-buffered", "warning", [0]),
        ("io-passed-over", "info", [0, 1]),
    ]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stalls": {"reduce": 0.7}}, "other ranks"),
        ({"stalls": {"optimizer state": 0.7}}, "disks"),
        ({"stalls": {"copies of parameters": 0.7}}, "nvidia-smi"),
        ({"update": 0.0}, "the program"),
        ({}, "clock and temperature"),
    ],
)
def test_the_remedy_for_slower_steps_and_stragglers_is_of_their_reason(
    changed: dict[str, Any], why: str
) -> None:
    slow = [replace(step, **changed) for step in steps(*[2.0] * 3)]
    (advice,) = [
        advice for advice in of(*live(steps=[*BASE.steps[:8], *slow])) if advice.code == "slower-now"
    ]
    assert why in advice.remedy
    if why != "other ranks":
        findings = of(*two(steps=[replace(step, **changed) for step in steps(*[2.0] * 11)]))
        (advice,) = [advice for advice in findings if advice.code == "straggler"]
        assert {"disks": "disk", "the program": "its program"}.get(why, why) in advice.remedy


def remedy(
    available: int, *, needed: int | None = 6 * GIB, formats: dict[str, int] | None = None, **settings: bool
) -> str:
    host = replace(HOST, available=available)
    configuration = ConfigurationStatus(
        "ds.json",
        "",
        settings=[SettingStatus(f"tiering.{key}", value, "file") for key, value in settings.items()],
    )
    plan = replace(PLAN, moved_by_format=formats or {}, host_without_nvme=needed)
    described = replace(DESCRIBED, configuration=configuration, plan=plan)
    waits = replace(BASE, tiers=[host, DISK], steps=steps(*[2.0] * 3, **bound))
    (advice,) = of(rank(waits, described))
    return advice.remedy


def test_the_remedy_for_copies_is_the_device_memory_that_is_there() -> None:
    def link_bound(**changed: Any) -> Advice:
        (advice,) = [advice for advice in of(*on_gpu(**copying, **changed)) if advice.code == "link-bound"]
        return advice

    others = "copies to or from GPUs, or uses the host's memory bandwidth"
    batch = "a larger micro-batch copies the parameters once for more samples"
    # Of 80 GiB a twentieth is spared; two ranks have a GPU each, and budgets are the node's.
    named = '26.0 GiB of device memory are free: tiering.device_budget "%dGiB" keeps more data on the device'
    assert link_bound().remedy == f"{named % 46}; {batch}"
    assert link_bound(ranks=2).remedy.startswith(named % 92)
    assert link_bound(ranks=2).ranks == [0, 1]
    assert link_bound(h2d=24e9).remedy == f"{named % 46} and lets copies start earlier; {batch}", (
        "a link with room"
    )
    assert (
        link_bound(free=7 * GIB).remedy
        == f"the device has no memory for a larger tiering.device_budget; {batch}"
    )
    assert link_bound(measured=11 * GB).remedy == link_bound().remedy
    assert link_bound(measured=12 * GB).remedy == f"check what else {others}; {link_bound().remedy}"
    assert link_bound(measured=12 * GB).text.endswith("20 %; 12.0 GB/s were measured in each direction")
    assert link_bound(h2d=3e9, d2h=1e9).text.startswith("the step is bound by copies to the device and back:")
    assert "6.0 GB to the device at 0 B/s" in link_bound(h2d=0.0).text


def test_the_remedy_for_nvme_is_the_memory_that_is_there() -> None:
    assert remedy(10 * GIB) == (
        "2.0 GiB more host budget (10.0 GiB are free) would keep optimizer state in RAM and save all of the 4.3 GB"
        ' that a step moves: set tiering.host_budget to "6144MiB"'
    )
    # Of 2 GiB one is spared for the machine, and 256 MiB are what staging may take of the other.
    part = remedy(2 * GIB)
    assert part.startswith(
        "1.0 GiB more host budget (2.0 GiB are free) would keep 768 MiB of the optimizer state in RAM"
    )
    assert "save about 1.6 GB of the 4.3 GB" in part and "gradient_accumulation_steps" in part
    assert remedy(GIB).startswith(
        "the machine has no memory for a larger tiering.host_budget; a directory on another drive"
    )
    assert remedy(10 * GIB, cache_in_host=False).startswith(
        "set tiering.cache_in_host to true: up to 0 B more then stay in RAM within host_budget;"
        " 2.0 GiB more host budget"
    )
    assert remedy(10 * GIB, needed=None).startswith("a directory on another drive in nvme_path"), (
        "memory would not help"
    )


def test_the_remedy_for_activations_is_their_budget() -> None:
    def remedy(**stalls: float) -> str:
        (advice,) = of(*live(steps=steps(*[2.0] * 3, stall=0.7, **stalls)))
        return advice.remedy

    assert remedy(activations=0.4, parameters=0.3).startswith(
        "raise tiering.activation_budget, and host_budget by as much (10.0 GiB of host memory are free)"
    )
    assert "activation" not in remedy(activations=0.3, parameters=0.4)


@pytest.mark.parametrize(
    ("formats", "text"),
    [
        ({"fp32": 4 * GIB, "split": 3 * GIB, "bf16": 3 * GIB, "split+bf16": 2 * GIB},
         'tiering.state "split" saves 1.1 GB a step or tiering.state "split+bf16" saves 2.1 GB a step (mo'),
        ({"split": 4 * GIB, "fp32": 5 * GIB, "split+bf16": 3 * GIB, "bf16": 4 * GIB},
         'bandwidth, tiering.state "split+bf16" saves 1.1 GB a step (moments in bf16) and more'),
        ({"fp32": 4 * GIB, "bf16": 4 * GIB - 1}, "bandwidth and more gradient_accumulation_steps"),
    ],
)  # fmt: skip
def test_where_memory_lacks_the_remedy_tells_what_another_format_saves(
    formats: dict[str, int], text: str
) -> None:
    assert text in remedy(GIB, formats=formats)


@settings(max_examples=40, deadline=None)
@given(workloads(), budgets, st.integers(0, 400 * MIB))
def test_a_plan_with_the_named_budget_keeps_the_named_kinds(load: Any, limits: Budgets, free: int) -> None:
    plan = planned(load, limits)
    load = replace(load, cache_in_host=True)
    more = larger_budget(plan.status(0), free)
    if more is None:
        return
    assert more.extra <= free
    then = make_plan(load, replace(plan.budgets, host=more.host_budget)).status(0)
    for kind in more.whole:
        assert not then.read.get(kind, 0) + then.written.get(kind, 0)
    if more.saved == more.moved:
        assert not sum(then.read.values()) + sum(then.written.values())


@pytest.mark.parametrize("free", [1 * GIB, 2 * GIB, 3 * GIB])
def test_what_a_part_saves_is_what_a_plan_then_saves(free: int) -> None:
    """A model of 24 blocks with 4 GB of state, of which some more fits."""
    groups = tuple(GroupSizes(f"layers.{i}", 2 * 12 * MIB, 12 * MIB) for i in range(24))
    load = example(groups=groups, cache_in_host=True, sub_group_numel=10**9)
    plan = make_plan(load, Budgets(PLENTY, 600 * MIB, PLENTY))
    more = larger_budget(plan.status(0), free)
    assert more is not None and 0 < more.saved < more.moved
    saved = sum(plan.nvme_traffic()) - sum(
        make_plan(load, replace(plan.budgets, host=more.host_budget)).nvme_traffic()
    )
    assert more.saved <= saved <= 1.25 * more.saved + 500 * MIB


def step_shown(home: Path) -> int:
    (run,) = Watch(home / "run").view().runs
    return max(snapshot.step for snapshot in run.snapshots)


def train(home: Path, host_budget: str, width: int, count: int) -> tuple[RankView, Callable[[], None]]:
    """A real engine after ``count`` steps, as its page shows it, and its end."""
    torch.manual_seed(0)
    swap = {"device": "nvme", "nvme_path": str(home)}
    engine = tiering.initialize(
        model=GPT(width=width, layers=3, heads=4, sequence=16),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_param": swap, "offload_optimizer": swap},
            "tiering": {"host_budget": host_budget, "telemetry": {"dir": str(home / "run")}},
        },
    ).engine
    tokens = torch.randint(256, (1, 17))
    for _ in range(count):
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    until(lambda: step_shown(home) == count)
    (run,) = Watch(home / "run").view().runs
    (shown,) = run.ranks
    return shown, engine.close


def named_budget(shown: RankView) -> str:
    (advice,) = [advice for advice in of(shown) if advice.code == "nvme-bound"]
    named = re.search(r'set tiering.host_budget to "(\w+)"', advice.remedy)
    assert named is not None, advice.remedy
    return named[1]


def on_nvme(shown: RankView) -> int:
    assert shown.snapshot is not None
    return sum(tier.used for tier in shown.snapshot.tiers if tier.name == "nvme")


def test_an_engine_with_the_named_budget_has_nothing_on_nvme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    shown, end = train(tmp_path, "3MiB", 128, 1)
    end()
    assert shown.snapshot is not None and on_nvme(shown) > 3 * MIB
    # How long such a small model waits is the disk's mood: here most of the step is declared as stall.
    waits = replace(shown, snapshot=replace(shown.snapshot, steps=steps(*[2.0] * 3, **bound)))
    budget = named_budget(waits)
    assert parse_size(budget) < 3 * on_nvme(shown)
    then, end = train(tmp_path, budget, 128, 1)
    end()
    assert on_nvme(then) == 0


@pytest.mark.slow
def test_who_follows_the_advice_waits_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with 120 MB of state, most of it on NVMe: its steps stall, and with the named budget they do not."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    shown, end = train(tmp_path, "64MiB", 640, 8)
    end()
    if "nvme-bound" not in {advice.code for advice in of(shown)}:
        pytest.skip("this machine's disk keeps up with the model: there is nothing to advise")
    then, end = train(tmp_path, named_budget(shown), 640, 8)
    end()
    assert on_nvme(then) == 0 < on_nvme(shown)
    assert "nvme-bound" not in {advice.code for advice in of(then)}


@settings(max_examples=40, deadline=None)
@given(
    st.builds(Snapshot),
    st.none() | st.builds(Description),
    st.sampled_from(["live", "stale", "silent", "torn"]),
)
def test_no_page_makes_it_raise(snapshot: Snapshot, described: Description | None, state: Any) -> None:
    run = RunView("gpt-1", "gpt", (RankView(0, state, "why", 0.1, snapshot, described), rank()))
    assert all(advice.text and "\n" not in advice.code for advice in advise(run))
    assert rendered(status(View(1.0, (run,))), 80, ASCII)
