"""What telemetry tells of a GPU: stalls and phases by its own clock, what went over the link, and when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tiering.placement.workload import Tier
from zero3.device.streams import CudaStreams
from zero3.device.timeline import PhaseClock, StallClock, Timeline
from zero3.observe.run_record import RunIdentity, RunRecord

from .conftest import DEVICE, batches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

CLOSE = 2e-3  # seconds: what the CPU may take between two calls, on a machine that others use, too
Sleep = Callable[[float], None]


@pytest.fixture
def sleep() -> Sleep:
    """``sleep(seconds)`` holds the current stream up for about so long. The CPU goes on."""
    began, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the clock is up the second time
        began.record()
        torch.cuda._sleep(50_000_000)
        end.record()
        end.synchronize()
    rate = 50_000_000 / (began.elapsed_time(end) / 1e3)
    return lambda seconds: torch.cuda._sleep(round(seconds * rate))


def test_a_stall_is_what_the_gpu_stands_still(sleep: Sleep) -> None:
    streams = CudaStreams(DEVICE)
    clock = StallClock(Timeline(), streams)
    sleep(0.2)
    with clock.waiting_for("parameters"):
        time.sleep(0.05)
    torch.cuda.synchronize()
    assert clock.seconds["parameters"] < CLOSE, "the GPU had something to do for all of it"
    began = time.perf_counter()
    with clock.waiting_for("parameters"):
        time.sleep(0.05)
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    assert 0.05 - CLOSE <= clock.seconds["parameters"] <= took + CLOSE, "it had nothing to do"
    # A copy that takes longer than what compute has before it: the difference, by events of the test's own.
    with streams.fetch.running():
        sleep(0.2)
    arrived = streams.fetch.record(timed=True)
    sleep(0.1)
    reached = streams.compute.record(timed=True)
    clock.hold(arrived, "copies of parameters")
    assert clock.seconds["copies of parameters"] == 0.0, "nobody has waited to find out"
    torch.cuda.synchronize()
    assert abs(clock.seconds["copies of parameters"] - arrived.seconds_since(reached)) < CLOSE


def test_phases_are_the_gpus(sleep: Sleep) -> None:
    clock = PhaseClock(CudaStreams(DEVICE))
    marks = []
    for phase, seconds in (("forward", 0.03), ("backward", 0.06), ("step", 0.01), ("idle", 0.0)):
        clock.enter(phase)
        marks.append(CudaStreams(DEVICE).compute.record(timed=True))
        sleep(seconds)
    assert clock.seconds == {"idle": 0.0}
    torch.cuda.synchronize()
    phases = [clock.seconds[phase] for phase in ("forward", "backward", "step")]
    spent = [end.seconds_since(began) for began, end in pairwise(marks)]
    assert all(abs(reported - other) < CLOSE for reported, other in zip(phases, spent, strict=True)), (
        phases,
        spent,
    )


def test_an_engine_tells_what_went_over_its_link_and_when(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(offload_param="cpu", offload_optimizer="cpu", threshold=0)
    engine.trace(tmp_path / "trace.json")
    for tokens, targets in batches(3):
        engine.backward(engine(tokens, targets))
        engine.step()
    torch.cuda.synchronize()
    snapshot = engine.snapshot()
    link = snapshot.link
    assert link is not None
    for way in (link.h2d, link.d2h):
        assert way.copies > 0
        assert 1e8 < way.bytes / way.busy_seconds < 1e12, "no link is slower, or faster"
    assert sum(step.h2d_bytes for step in snapshot.steps) <= link.h2d.bytes
    # The tied weight has two parts: of the head, early in backward, and of the embedding, at its end.
    parts = [*engine.module.parameters(), engine.module.head.weight]
    gradients = sum(2 * param.numel() for param in parts)
    assert link.d2h.bytes == 3 * gradients, "each gradient leaves the device once"
    torch_has = snapshot.device_memory
    device = snapshot.tiers[0]
    assert torch_has is not None and device.name == Tier.DEVICE.value
    assert device.used <= torch_has.allocated <= torch_has.peak
    free, total = torch.cuda.mem_get_info()
    assert device.available is not None and device.available <= total
    assert abs(device.available - free) < total / 20, "what is free, as far as others did not change it"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (step,) = (event for event in events if event.get("cat") == "step")
    copies = [event for event in events if event.get("cat") in ("h2d", "d2h")]
    assert copies
    # Not before the step or long behind it: the two clocks were compared at its end.
    first, last = min(copy["ts"] for copy in copies), max(copy["ts"] + copy["dur"] for copy in copies)
    assert step["ts"] - 1e6 * step["dur"] < first < last < step["ts"] + 2 * step["dur"] + 1e4
    assert sum(copy["args"]["bytes"] for copy in copies if copy["cat"] == "d2h") == gradients


def test_room_is_told_without_the_driver(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(offload_param="cpu", offload_optimizer="cpu")
    record = RunRecord(RunIdentity("room"), engine._tiers, engine._schedule.activations)
    before = record.snapshot().tiers[0].available
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    again = RunRecord.snapshot(record).tiers[0].available
    assert before is not None and again == before
