"""Advice: each fires on a run that has it and not on its neighbour."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.advice import Advice, advise
from service.responses.status import status
from service.terminal.rendering import ASCII, rendered
from service.view import RankView, RunView, View
from tiering.telemetry import (
    CheckpointStatus,
    ConfigurationStatus,
    Description,
    DriveStatus,
    IoEngineStatus,
    SettingStatus,
    Snapshot,
)

from .advised_runs import (
    BASE,
    DESCRIBED,
    DISK,
    GB,
    GIB,
    HOST,
    PLAN,
    bound,
    configured,
    copying,
    each,
    live,
    of,
    on_gpu,
    path,
    planned_as,
    rank,
    read,
    slow_of_two,
    steps,
    two,
    waiting,
)


def idle(seconds: float, **changes: Any) -> list[RankView]:
    return [rank(replace(BASE, phase="idle", phase_since=1000.0, **changes), published_at=1000.0 + seconds)]


# code, whether it is an error, a run that has it, its neighbour without, and what it says
# fmt: off
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
    ("io-rereads", live(**read(rereads=1)), live(**read()), "1 read of /nvme had to be tried again"),
    (
        "drive-worn",
        live(io=[replace(path(), drive=DriveStatus(0.9, 10**15))]),
        live(io=[replace(path(), drive=DriveStatus(0.89, 10**15))]),
        "a drive of /nvme has used 90 % of its endurance",
    ),
    ("io-slow-path", slow_of_two(1.1e9), slow_of_two(1.3e9), "/b reaches 1.1 GB/s"),
    # The average since the start still looks well.
    ("io-slow-path", slow_of_two(2e9, recent=11 * 10**8), slow_of_two(2e9, recent=13 * 10**8), "/b reaches 1.1 GB/s"),
    ("io-buffered", live(io=[replace(path(), direct=False)]), live(), "/nvme is not opened with O_DIRECT"),
    (
        "io-passed-over",
        live(io_engine=IoEngineStatus("libaio", passed_over={"io_uring": "EPERM"})),
        live(io_engine=IoEngineStatus("io_uring")),
        "io_uring is not in use: EPERM",
    ),
    (
        "io-passed-over",
        live(io_engine=IoEngineStatus("io_uring", ["registered_buffers"], 9, {"registered_buffers": "ENOMEM"})),
        live(io_engine=IoEngineStatus("io_uring", ["registered_buffers"], 9)),
        "registered_buffers is used for a part of the memory only: ENOMEM",
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
    ("stuck", idle(120.0), idle(119.0), "idle has taken 2 min"),
    ("stuck", idle(400.0, steps=steps(*[20.0] * 3)), idle(399.0, steps=steps(*[20.0] * 3)), "a whole step takes 20"),
    ("stuck", idle(600.0, checkpoint=CheckpointStatus(True)), idle(599.0, checkpoint=CheckpointStatus(True)), "saved"),
    ("checkpoint-failed", live(checkpoint=CheckpointStatus(error="EIO")), live(checkpoint=CheckpointStatus()), "EIO"),
    ("config-without-effect", configured(without_effect=["a.b"]), configured(), "a.b"),
    ("config-deprecated", configured(deprecated=["a", "b", "c", "d"]), configured(), "are deprecated: a, b, c,"),
    ("rank-silent", [rank(state="silent", heartbeat_age=14.0), *two()[1:]], two(), "not published for 14.0 s"),
    ("rank-stale", [rank(state="stale"), *two()[1:]], [rank(state="stale"), *two()], "rank 0 is stale"),
    (
        "rank-unreachable",
        [rank(state="unreachable", reason="a:1 does not answer: it is off"), *two()[1:]],
        two(),
        "node a:1 does not answer: it is off; its ranks may train",
    ),
    ("rank-newer-version", [rank(state="newer-version", snapshot=None)], [rank()], "rank 0 cannot be shown"),
    ("rank-unreadable", [rank(state="unreadable", snapshot=None)], [rank()], "rank 0 cannot be read"),
    ("rank-torn", [rank(state="torn", snapshot=None)], [rank()], "at the moment"),
    ("rank-missing", two()[1:], two(), "1 of the 2 ranks"),
    ("run-ended", [rank(state="stale")], [rank()], "after step 12"),
]
# fmt: on


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
        (
            {"fp32": 4 * GIB, "split": 3 * GIB, "bf16": 3 * GIB, "split+bf16": 2 * GIB},
            'tiering.state "split" saves 1.1 GB a step or tiering.state "split+bf16" saves 2.1 GB a step (mo',
        ),
        (
            {"split": 4 * GIB, "fp32": 5 * GIB, "split+bf16": 3 * GIB, "bf16": 4 * GIB},
            'bandwidth, tiering.state "split+bf16" saves 1.1 GB a step (moments in bf16) and more',
        ),
        ({"fp32": 4 * GIB, "bf16": 4 * GIB - 1}, "bandwidth and more gradient_accumulation_steps"),
    ],
)
def test_where_memory_lacks_the_remedy_tells_what_another_format_saves(
    formats: dict[str, int], text: str
) -> None:
    assert text in remedy(GIB, formats=formats)


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
