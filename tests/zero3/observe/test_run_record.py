"""What an engine tells of itself: who it is, how it learns, what it waits for, and what went over each path."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.fake_device import DEVICE, FakeDevice
from tests.fakes.gpu.streams import never
from tests.fakes.queued_device import QueuedDevice
from tiering.config.training import TelemetryConfig
from tiering.errors import CheckpointError, TelemetryError
from tiering.placement.workload import Tier
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.telemetry import (
    CheckpointStatus,
    CopyStatus,
    DeviceMemoryStatus,
    LinkStatus,
    Snapshot,
    find_status_files,
)
from zero3.device import tiers, timeline
from zero3.device.link_copies import LinkStats
from zero3.observe import free_memory, run_record
from zero3.observe.run_record import RunIdentity, RunRecord, Sources
from zero3.ranks.joining import World
from zero3.ranks.mesh import MeshPlace

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


@pytest.mark.parametrize("chosen", ["auto", "threads"])
def test_a_snapshot_tells_the_io_engine_and_what_went_over_the_path(
    start: Callable[..., Any], micro_batches: Any, chosen: str
) -> None:
    engine = start(**STREAMED, io={"engine": chosen}, telemetry={"enabled": False})
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
    while any(file.read.in_flight or file.write.in_flight for file in engine._tiers.aio.stats()):
        time.sleep(0.001)
    snapshot = engine.snapshot()  # the first one: percentiles are kept for a second
    engine_figures = snapshot.io_engine
    with AioContext(engine=chosen) as like:
        assert engine_figures.name == like.engine
    if engine_figures.name == "io_uring":
        assert {"registered_buffers", "registered_files"} <= set(engine_figures.flags)
        tiers = engine._tiers
        assert engine_figures.registered_bytes == tiers.host.capacity + tiers.device_arena.capacity
    else:
        assert (engine_figures.flags, engine_figures.registered_bytes) == ([], 0)
    (path,) = snapshot.io
    for direction in (path.read, path.written):
        assert direction.ops > 0
        assert sum(direction.latency_buckets) == direction.ops
        assert direction.latency_buckets[-1] > 0
        # A transfer takes between a microsecond and a minute.
        slowest = len(direction.latency_buckets) - 1
        assert 10 <= slowest <= math.log2(60e9)
        assert direction.errors_by_errno == {}
        latency = direction.latency
        assert 0 < latency.p50 <= latency.p90 <= latency.p99 <= latency.p999 <= latency.longest
        assert 2 ** (slowest - 30) < latency.longest < 2.0 ** (slowest - 28)  # a nanosecond is about 2^-30 s
        assert latency.longest <= direction.latency_seconds <= direction.ops * latency.longest
    assert 0.0 <= path.queue_full_seconds <= path.read.busy_seconds + path.written.busy_seconds


def test_checksums_are_told(start: Callable[..., Any]) -> None:
    assert "verify" in start(**STREAMED, verify=True).snapshot().io_engine.flags


def test_without_swap_space_there_is_no_io_engine(start: Callable[..., Any]) -> None:
    snapshot = start().snapshot()
    assert (snapshot.io, snapshot.io_engine) == ([], None)


def test_a_step_tells_what_it_came_to_and_what_it_waited_for(
    start: Callable[..., Any], micro_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are more tiles than slots: the step reads the last ones, and waits for them.
    slow = FaultPlan((Fault("read", count=0, delay=0.005),))
    monkeypatch.setattr(tiers, "AioContext", lambda **options: AioContext(fault=slow, **options))
    engine = start(**STREAMED, run_name="who.am-I", accumulation=1, sub_group_size=500, host_budget="600KiB")
    assert (
        len([tile for run in engine.plan.runs for tile in run.sub_groups()]) > 2 * engine.plan.staging.slots
    )
    snapshots = [engine.snapshot()]
    for tokens, targets in micro_batches(2):
        engine.backward(engine(tokens, targets))
        engine.step()
        snapshots.append(engine.snapshot())
    for number, snapshot in enumerate(snapshots):
        assert re.fullmatch("who_am-I-[0-9a-f]{8}", snapshot.run_id)
        assert snapshot.run_id == snapshots[0].run_id
        assert (snapshot.step, snapshot.global_step, snapshot.samples) == (number, number, 2 * number)
        assert snapshot.learning_rate == 1e-3
    last = snapshots[-1]
    assert (snapshots[0].gradient_norm, last.gradient_norm) == (None, engine.get_global_grad_norm())
    assert (last.loss_scale, last.skipped_steps, last.phase) == (None, 0, "idle")
    assert last.started_at <= last.steps[0].ended_at < last.steps[1].ended_at <= last.phase_since + 1
    for step in last.steps:
        assert 0 < sum(step.stalls.values()) == pytest.approx(step.stall)
    in_phases = Counter[str]()
    for waits in last.stalls_by_phase.values():
        in_phases.update(waits)
    assert dict(in_phases) == pytest.approx(last.stalls)
    in_step = last.stalls_by_phase["step"]
    assert "optimizer state" in in_step.keys() <= {"optimizer state", "staging", "gradients"}
    assert in_step["optimizer state"] <= last.phase_seconds["step"]
    assert last.stalls_by_phase["forward"].keys() == {"parameters"}
    assert set(last.phase_seconds) == {"forward", "backward", "step", "idle"}
    assert (
        0
        < sum(last.phase_seconds.values()) - last.phase_seconds["idle"]
        <= engine._observation.record.elapsed
    )


def test_what_is_between_the_phases_is_idle(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 0.0

        def time(self) -> float:
            return 1000 + self.now

        def perf_counter(self) -> float:
            return self.now

        def monotonic_ns(self) -> int:
            return 0

    engine, clock = start(), Clock()
    monkeypatch.setattr(run_record, "time", clock)
    monkeypatch.setattr(timeline, "time", clock)
    record = RunRecord(RunIdentity("idle"), engine._tiers, engine._schedule.activations)
    clock.now = 50.0  # before the first forward the program may do what it likes
    assert record.snapshot().phase_seconds == {"idle": 0}
    expected: Counter[str] = Counter()
    for phase, seconds in (("forward", 1), ("backward", 2), ("step", 4), ("forward", 8)):
        with record.phases.running(phase):
            since = 1000 + clock.now
            clock.now += seconds / 2
            snapshot = record.snapshot()
            assert (snapshot.phase, snapshot.phase_since, engine._tiers.stalls.phase) == (phase, since, phase)
            assert snapshot.phase_seconds[phase] == expected[phase] + seconds / 2, "while it goes on"
            with record.phases.running("forward"):
                clock.now += 16
            clock.now += seconds / 2
            assert record.snapshot().phase == phase
        expected.update({phase: seconds, "idle": 100})
        expected["forward"] += 16
        since = 1000 + clock.now
        clock.now += 100
        snapshot = record.snapshot()
        assert (snapshot.phase, snapshot.phase_since, engine._tiers.stalls.phase) == ("idle", since, "idle")
        assert snapshot.phase_seconds == expected


def test_a_skipped_step_and_the_loss_scale_are_told(
    start: Callable[..., Any], micro_batches: Any, tmp_path: Path
) -> None:
    scaled = {"loss_scale": 0, "initial_scale_power": 40, "hysteresis": 1}
    engine = start(precision="fp16", accumulation=1, fp16=scaled)
    for tokens, targets in micro_batches(1):
        engine.backward(engine(tokens, targets))
        engine.step()
    snapshot = engine.snapshot()
    assert (snapshot.step, snapshot.skipped_steps, snapshot.loss_scale) == (1, 1, 2.0**39)
    assert not math.isfinite(snapshot.gradient_norm)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    resumed = start(precision="fp16", accumulation=1, fp16=scaled)
    resumed.load_checkpoint(tmp_path / "saved")
    snapshot = resumed.snapshot()
    assert (snapshot.step, snapshot.skipped_steps) == (0, 0), "since the start of the process"
    assert (snapshot.global_step, snapshot.global_skipped_steps) == (1, 1) == (1, resumed.skipped_steps)


def test_the_loss_is_that_of_the_last_micro_batch(start: Callable[..., Any], micro_batches: Any) -> None:
    engine = start(accumulation=2)
    losses = []
    for tokens, targets in micro_batches(2):
        losses.append(engine(tokens, targets))
        engine.backward(losses[-1])
        engine.step()
    assert engine.snapshot().loss == losses[1].item() != losses[0].item()


def test_an_engine_describes_its_plan_and_its_configuration(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    engine = start(**STREAMED, precision="bf16", state="split", telemetry={"dir": str(tmp_path / "pages")})
    (page,) = find_status_files(tmp_path / "pages")
    description = page.read().description
    assert description == engine._observation.description
    assert description.versions.keys() == {"tiering", "torch", "python", "linux"}
    assert (description.device, description.versions["torch"]) == ("cpu", torch.__version__)
    plan, load = description.plan, engine.plan.workload
    for planned in plan.tiers:
        assert planned.by_kind == engine.plan.contents(Tier(planned.name))
        assert planned.planned == sum(planned.by_kind.values()) <= planned.budget
    assert (sum(plan.read.values()), sum(plan.written.values())) == engine.plan.nvme_traffic()
    assert set(plan.read) == set(plan.written) == {"parameters", "optimizer state"}
    assert (
        plan.written["optimizer state"] == sum(t.numel for t in engine.plan.sub_groups) * load.state_itemsize
    )
    assert plan.parameters == sum(piece.numel for group in engine._groups for piece in group.layout.pieces)
    assert (plan.groups, plan.micro_batches, plan.state_format) == (len(load.groups), 2, "split")
    settings = {
        setting.key: (setting.value, setting.origin) for setting in description.configuration.settings
    }
    assert settings["tiering.state"] == ("split", "file")
    assert settings["tiering.verify"] == (False, "default")
    assert settings["tiering.nvme_budget"] == (engine.plan.budgets.nvme, "auto")
    assert settings["tiering.host_budget"] == ("64MiB", "file")
    assert settings["tiering.grad_accum_dtype"] == ("fp32", "auto"), "of two micro-batches"
    assert settings["tiering.io.engine"] == (engine._tiers.aio.engine, "auto")
    assert plan.moved_by_format == engine.plan.moved_by_format and len(plan.moved_by_format) > 1
    assert 0 < plan.host_without_nvme == engine.plan.host_without_nvme


def test_an_engine_that_cannot_go_on_says_why(
    start: Callable[..., Any], micro_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(accumulation=1)
    ((tokens, targets),) = micro_batches(1)
    engine.backward(engine(tokens, targets))

    def fail(*_: object) -> None:
        raise OSError("the disk is gone \udcff" + "!" * 2000)

    # Some of its parameters may be updated, and others not.
    monkeypatch.setattr(engine.optimizer.stepper._batch, "run", fail)
    assert engine.snapshot().broken == ""
    with pytest.raises(OSError, match="gone"):
        engine.step()
    reason = Snapshot.from_json(engine.snapshot().to_json()).broken
    assert reason.startswith("step 1 was ended by OSError: the disk is gone ?!!!")
    assert len(reason) == 1000


def test_saves_are_told(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start()
    assert engine.snapshot().checkpoint == CheckpointStatus()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        engine.save_checkpoint(tmp_path / "file", tag="nowhere")
    refused = engine.snapshot().checkpoint
    assert (refused.saved, refused.failed, refused.path) == (0, 1, str(tmp_path / "file" / "nowhere"))
    assert refused.error and refused.nbytes == 0
    engine.save_checkpoint(tmp_path / "saves", tag="first")
    saved = engine.snapshot().checkpoint
    assert (saved.under_way, saved.saved, saved.failed, saved.error) == (False, 1, 1, "")
    assert saved.path == str(tmp_path / "saves" / "first")
    assert saved.seconds >= saved.stalled > 0
    assert saved.ended_at >= engine.snapshot().started_at
    assert saved.nbytes > 0


def test_free_room_is_asked_for_now_and_then(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, now, free = start(**STREAMED), 100.0, 5000
    monkeypatch.setattr(free_memory.time, "monotonic", lambda: now)
    monkeypatch.setattr(free_memory, "available_memory", lambda: free)
    monkeypatch.setattr(free_memory, "free_by_file_system", lambda _: {1: free, 2: 7})
    memory = free_memory.FreeMemory(engine._tiers)
    for moment, there, expected in ((100.0, 5000, 5000), (101.9, 4000, 5000), (102.0, 3000, 3000)):
        now, free = moment, there
        free_bytes = [memory.available(tier) for tier in Tier]
        assert free_bytes == [expected, expected, expected + 7]

    def fail(_: object) -> dict[int, int]:
        raise FileNotFoundError

    now = 200.0
    assert memory.device_memory() is None
    counted = {
        "allocated_bytes.all.current": 3,
        "allocated_bytes.all.peak": 9,
        "reserved_bytes.all.current": 10,
    }
    gpu = torch.device("cuda:1")
    for name, expected in (("memory_stats", counted), ("memory_reserved", 4), ("mem_get_info", (60, 100))):
        monkeypatch.setattr(free_memory.torch.cuda, name, {gpu: expected}.__getitem__)
    on_gpu = free_memory.FreeMemory(SimpleNamespace(device=gpu, device_is_host=False, swap=None))
    monkeypatch.delattr(free_memory.torch.cuda, "mem_get_info")  # while it trains, nobody may ask the driver
    assert on_gpu.device_memory() == DeviceMemoryStatus(allocated=3, peak=9, reserved=10)
    assert on_gpu.available(Tier.DEVICE) == 54, "64 were torch's or free at the start"
    counted["reserved_bytes.all.current"] = 70
    now = 300.0
    assert on_gpu.available(Tier.DEVICE) == 0, "others have gone, and torch has what they had"
    monkeypatch.setattr(free_memory, "free_by_file_system", fail)
    assert memory.available(Tier.NVME) is None
    assert [tier.available is not None for tier in start().snapshot().tiers] == [True, True, False]
    disk = os.statvfs(engine._tiers.swap.directories[0])
    assert engine.snapshot().tiers[2].capacity == disk.f_blocks * disk.f_frsize, "used by others or not"


class Counted:
    """Traffic under the test's control."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def count(self, kind: str, nbytes: int) -> None:
        self.calls[kind] += 1
        self.sent[kind] += nbytes


def test_a_rank_tells_who_it_is_and_what_it_sent(start: Callable[..., Any], tmp_path: Path) -> None:
    engine, traffic = start(), Counted()
    traffic.count("control", 1000)  # building the engine is not part of the first step
    place = MeshPlace(0, 2, 1, 2, {"data": 0, "sequence": 1})
    world = World(rank=1, size=4, local_rank=1, local_size=2, place=place)
    record = RunRecord(
        RunIdentity("many", world=world),
        engine._tiers,
        engine._schedule.activations,
        sources=Sources(traffic=traffic),
    )
    traffic.count("all-gather", 300)
    traffic.count("reduce", 50)
    record.end_step()
    traffic.count("reduce", 70)
    record.end_step()
    snapshot = record.snapshot()
    assert (snapshot.rank, snapshot.world_size, snapshot.mesh) == (1, 4, {"data": 0, "sequence": 1})
    assert (snapshot.local_rank, snapshot.local_world_size, snapshot.node) == (1, 2, socket.gethostname())
    assert [
        (collective.kind, collective.calls, collective.sent_bytes) for collective in snapshot.collectives
    ] == [
        ("control", 1, 1000),
        ("all-gather", 1, 300),
        ("reduce", 2, 120),
    ]
    assert [step.sent_bytes for step in snapshot.steps] == [350, 70]
    publisher = record.publish(TelemetryConfig(dir=tmp_path / "pages"))
    (page,) = find_status_files(tmp_path / "pages")
    publisher.close()
    assert (page.run_name, page.rank) == ("many", 1)


def test_what_goes_over_the_link_is_told_by_step(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, device = start(), QueuedDevice(monkeypatch)
    assert engine.snapshot().link is None, "the CPU is the device"
    stats = {"h2d": LinkStats(1000, 1, 0.5), "d2h": LinkStats()}  # building the engine is no step
    linked = copy.copy(engine._tiers)
    linked.streams, linked.copies = device, SimpleNamespace(stats=lambda: dict(stats))
    record = RunRecord(RunIdentity("linked"), linked, engine._schedule.activations, link_rate=52_500_000_000)
    stats |= {"h2d": LinkStats(1700, 3, 0.75)}
    with record.phases.running("forward"):
        device.works(2)
    device.passes(2)
    record.end_step()
    stats |= {"h2d": LinkStats(1800, 4, 1.0), "d2h": LinkStats(30, 2, 0.25)}
    record.end_step()
    snapshot = record.snapshot()
    assert [(step.h2d_bytes, step.d2h_bytes, step.forward) for step in snapshot.steps] == [
        (700, 0, 2.0),
        (100, 30, 0.0),
    ]
    assert snapshot.link == LinkStatus(CopyStatus(1800, 4, 1.0), CopyStatus(30, 2, 0.25), 52_500_000_000)


def test_an_engine_on_a_device_tells_its_copies_and_waits(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine as it is, on a device made of CPU memory; events say of nothing that it is over."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)]
    with FakeDevice(answers=never) as device:
        device.run_engines(monkeypatch)
        offloaded = {"offload_param": "cpu", "offload_optimizer": "cpu", "threshold": 0}
        engine = start(nn.Sequential(*layers), precision="fp32", accumulation=1, **offloaded)
        engine.trace(tmp_path / "trace.json")
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 64, device=DEVICE)).sum())
            engine.step()
        device.streams.synchronize()
        snapshot = engine.snapshot()
    trained = sum(4 * parameter.numel() for layer in layers for parameter in layer.parameters())
    assert snapshot.link is not None
    assert snapshot.link.d2h.bytes == 2 * trained <= snapshot.link.h2d.bytes
    assert {"copies of parameters", "copies of gradients"} <= set(snapshot.stalls)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"h2d", "d2h", "wait"} <= {event.get("cat") for event in events}


def test_one_rank_alone_sends_nothing(start: Callable[..., Any]) -> None:
    snapshot = start().snapshot()
    assert (snapshot.rank, snapshot.world_size, snapshot.collectives) == (0, 1, [])


@pytest.mark.parametrize("wrong", ["parent", "mode", "temporary"])
def test_a_run_directory_that_cannot_be_used_stops_no_training(
    wrong: str,
    start: Callable[..., Any],
    micro_batches: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    directory = tmp_path / "no" / "parent" if wrong == "parent" else tmp_path / "open"
    monkeypatch.setenv("TIERING_RUN_DIR", str(directory))
    if wrong == "temporary":  # the default, which anybody may have made before
        monkeypatch.delenv("TIERING_RUN_DIR")
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        directory = tmp_path / f"tiering-{os.geteuid()}"
        directory.symlink_to(tmp_path / "open")
    engine = start(**STREAMED, telemetry={"enabled": True})
    message = next(text for text in caplog.messages if "[TIER-TELEMETRY]" in text)
    assert str(directory) in message
    private = Path(message.partition("tierd --dir ")[2].partition(" ")[0])
    (page,) = find_status_files(private)
    for tokens, targets in micro_batches(1):
        engine.backward(engine(tokens, targets))
        engine.step()
    engine.close()
    assert not private.exists()
    assert page.path.parent == private and engine.micro_steps == 1


def test_a_directory_that_the_configuration_names_must_hold_pages(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(TelemetryError, match=r"run directory .*no/parent cannot be used"):
        start(**STREAMED, telemetry={"enabled": True, "dir": str(tmp_path / "no" / "parent")})
