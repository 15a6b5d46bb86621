"""The trace of one step: what it must hold, that it costs and changes nothing else, and what goes wrong."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.queued_device import Mark, QueuedDevice
from tiering.errors import EngineStateError, SwapError, TelemetryError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from zero3.device import tiers
from zero3.device.timeline import StallClock, Timeline
from zero3.engine.engine import Engine
from zero3.observe.trace import StepTrace
from zero3.optimizer.tile_stepper import TileStepper

STREAMED = {
    "offload_param": "nvme",
    "offload_optimizer": "nvme",
    "cache_in_host": False,
    "sub_group_size": 20000,
}
EPSILON = 1e-3  # microseconds: what a float keeps of a nanosecond


@dataclass
class Event:
    row: str
    track: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]


@dataclass
class Trace:
    """A trace as a viewer sees it. Times are in microseconds."""

    events: list[Event]

    def of(self, track: str) -> list[Event]:
        return [event for event in self.events if event.track == track]

    @property
    def step(self) -> Event:
        (step,) = self.of("step")
        return step

    def names(self, track: str) -> Counter[str]:
        return Counter(event.name for event in self.of(track))


def read_trace(path: Path) -> Trace:
    """The file at ``path``, which is held to the format."""
    records = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    rows = {
        event["tid"]: event["args"]["name"]
        for event in records
        if (event["ph"], event["name"]) == ("M", "thread_name")
    }
    assert len(set(rows.values())) == len(rows)
    events = []
    for event in records:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "X":
            begin, duration = event["ts"], event["dur"]
            assert begin >= 0 <= duration
            assert rows[event["tid"]].split()[0].startswith(event["cat"])
            row, name = rows[event["tid"]], event["name"]
            events.append(Event(row, event["cat"], name, begin, begin + duration, event["args"]))
    return Trace(sorted(events, key=lambda event: (event.begin, -event.end)))


def update(engine: Engine, batches: Iterator[Any]) -> None:
    for _ in range(engine.settings.gradient_accumulation_steps):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()


def bytes_at_rest(engine: Engine) -> tuple[int, int]:
    """What C has counted, once nothing is under way."""
    aio = engine._tiers.aio
    assert aio is not None
    while any(file.read.in_flight or file.write.in_flight for file in aio.stats()):
        pass
    for request in list(aio._transfers._live):
        aio._transfers.wait(request, None)
    return engine._observation.record.moved()


def test_one_whole_step(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, batches, path = start(**STREAMED), micro_batches(6), tmp_path / "step.json"
    counted, end_step = [], StepTrace.end_step

    def end_step_at_rest(trace: StepTrace, number: int) -> bool:
        counted.append(bytes_at_rest(engine))
        return end_step(trace, number)

    monkeypatch.setattr(StepTrace, "end_step", end_step_at_rest)
    update(engine, batches)
    engine.trace(path)
    update(engine, batches)
    assert path.read_bytes() == b""  # the step under way was not whole
    update(engine, batches)
    trace, record = read_trace(path), engine.snapshot().steps[-1]
    step = trace.step

    assert step.name == f"step {record.step}" == "step 3"
    assert {"compute", "kernels", "fetches", "reads", "writes", "stalls"} <= {
        event.row for event in trace.events
    }
    for event in trace.events:
        assert step.begin <= event.begin <= event.end <= step.end + EPSILON
        assert "runs_over" not in event.args
        assert "unfinished" not in event.args or event.track == "fetch"

    phases = trace.names("compute")
    assert (phases["forward"], phases["backward"]) == (2, 2)
    assert (phases["step"], phases["norm"], phases["update"]) == (1, 1, 1)
    for group in [group for group in engine._groups if group.entries]:  # the others' parameters never move
        assert phases[f"forward {group.name}"] >= 2
        assert phases[f"backward {group.name}"] >= 2
        if group.moves:
            fetched = [event for event in trace.of("fetch") if event.name == group.name]
            assert len(fetched) >= 2
            size = group.layout.numel * group.dtype.itemsize
            assert all(event.args["bytes"] == size and event.args["tensors"] for event in fetched)

    before, after = counted
    for place, track in enumerate(("read", "write")):
        moved = trace.of(track)
        assert sum(event.args["bytes"] for event in moved) == after[place] - before[place] > 0
        for event in moved:
            assert event.name in ("parameters", "gradients", "optimizer state")
            assert event.args["tensors"] and event.args["path"] == str(tmp_path / "nvme")
            assert event.args["queued_us"] >= 0
    stalled = sum(event.end - event.begin for event in trace.of("stall")) / 1e6
    assert stalled == pytest.approx(record.stall, abs=1e-6)
    assert set(trace.names("stall")) <= set(engine.snapshot().stalls)


def test_what_runs_over_is_whole_and_marked(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every write takes so long that the last ones of a step end in the next."""
    delay = 0.2
    slow = FaultPlan((Fault("write", count=0, delay=delay),))
    monkeypatch.setattr(tiers, "AioContext", lambda **options: AioContext(fault=slow, **options))
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(2)
    finish = TileStepper.finish

    def finish_and_issue(stepper: TileStepper) -> None:
        finish(stepper)
        # Steps are short: the driver may issue the last writes only behind the end of the step.
        while not engine._tiers.aio.stats()[0].write.in_flight:
            time.sleep(0.001)

    monkeypatch.setattr(TileStepper, "finish", finish_and_issue)
    engine.trace(tmp_path / "step.json")
    update(engine, batches)
    update(engine, batches)
    trace = read_trace(tmp_path / "step.json")
    step, over = trace.step, Counter[str]()
    for event in trace.events:
        assert event.end > step.begin and event.begin < step.end
        marked = event.args.get("runs_over")
        assert (marked == "from the previous step") == (event.begin < step.begin)
        assert (marked == "into the next step") == (
            event.begin >= step.begin and event.end > step.end + EPSILON
        )
        if event.track == "write":
            assert event.end - event.begin >= delay * 1e6
            over[marked or "inside"] += 1
    assert over["from the previous step"] > 0 < over["into the next step"]


def test_a_fetch_lasts_from_its_read_until_compute_has_the_group(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(3)
    update(engine, batches)
    engine.trace(tmp_path / "step.json")
    update(engine, batches)
    update(engine, batches)
    trace = read_trace(tmp_path / "step.json")
    moving = [group for group in engine._groups if group.moves]
    assert len(moving) >= 4
    for group in moving:
        fetches = [event for event in trace.of("fetch") if event.name == group.name]
        (tensors,) = {fetch.args["tensors"] for fetch in fetches}
        reads = [
            event
            for event in trace.of("read")
            if event.name == "parameters" and event.args["tensors"] == tensors
        ]
        used = [event for event in trace.of("compute") if event.name.endswith(f" {group.name}")]
        assert len(fetches) >= 2
        before = 0.0
        for fetch, read in zip(fetches, reads, strict=True):
            assert before <= read.begin <= read.end <= fetch.end + EPSILON
            assert any(fetch.end <= event.begin + EPSILON for event in used) or "dropped" in fetch.args
            before = fetch.end


def test_what_a_device_does_lies_where_it_did_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's clock, though the CPU was long gone; the copy that is under way at the end is waited for."""
    device, timeline = QueuedDevice(monkeypatch), Timeline()
    stalls = StallClock(timeline, device)
    traced = StepTrace(tmp_path / "trace.json", SimpleNamespace(timeline=timeline, aio=None, streams=device))
    device.passes(100)
    assert not traced.end_step(7)
    device.works(2)
    first = device.record(timed=True)
    device.works(3)
    copied = device.record(timed=True)
    timeline.add_device_span("h2d", "parameters", first, copied, bytes=5)
    stalls.hold(Mark(device, device.now + 6 * 10**9), "copies of parameters")
    with stalls.waiting_for("gradients"):
        device.passes(8)
    began = device.record(timed=True)
    device.works(4)
    timeline.add_device_span("d2h", "gradients", began, device.record(timed=True))
    device.passes(3)
    assert traced.end_step(8)
    assert device.now == 112 * 10**9
    timeline.add_device_span("d2h", "late", began, began)
    spans = [
        (span.row, span.name, *(round(at / 1e6, 6) for at in (span.begin, span.end)), span.args)
        for span in read_trace(tmp_path / "trace.json").events
    ]
    assert spans == [
        ("step", "step 8", 0, 11, {}),
        ("waits of the CPU", "gradients", 0, 8, {}),
        ("h2d copies", "parameters", 2, 5, {"bytes": 5}),
        ("stalls", "copies of parameters", 5, 6, {}),
        ("stalls", "gradients", 6, 8, {}),
        ("d2h copies", "gradients", 8, 12, {"runs_over": "into the next step"}),
    ]


def test_a_row_never_shows_two_things_at_once(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    """Kernels of two threads, one of them around another, and whatever the step does itself."""
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(3)
    timeline = engine._tiers.timeline
    meet = threading.Barrier(2)

    def kernel(name: str) -> None:
        with timeline.span("kernel", name, elements=3):
            meet.wait()
            with timeline.span("kernel", f"in {name}"):
                meet.wait()

    update(engine, batches)
    engine.trace(tmp_path / "step.json")
    update(engine, batches)
    threads = [threading.Thread(target=kernel, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    update(engine, batches)

    trace = read_trace(tmp_path / "step.json")
    mine = {"one", "other", "in one", "in other"}
    kernels = {event.name: event for event in trace.of("kernel") if event.name in mine}
    assert set(kernels) == mine
    assert kernels["one"].args == {"elements": 3}
    rows = {name: event.row for name, event in kernels.items()}
    assert {rows["one"], rows["other"]} == {"kernels", "kernels 2"}
    assert (rows["in one"], rows["in other"]) == (rows["one"], rows["other"])
    for row in {event.row for event in trace.events}:
        around: list[Event] = []
        for event in [event for event in trace.events if event.row == row]:
            while around and around[-1].end <= event.begin + EPSILON:
                around.pop()
            if around:
                assert event.track in ("compute", "kernel")
                assert event.end <= around[-1].end + EPSILON
            around.append(event)


def test_without_a_trace_nothing_is_kept(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(4)
    timeline, aio = engine._tiers.timeline, engine._tiers.aio
    assert aio is not None

    def at_rest() -> bool:
        idle = timeline.span("kernel", "one") is timeline.span("fetch", "other", bytes=3)
        return idle and not timeline.recording and not timeline.spans and not aio._transfers.is_recording

    update(engine, batches)
    assert at_rest()
    engine.trace(tmp_path / "step.json")
    assert not at_rest()
    update(engine, batches)
    update(engine, batches)
    assert at_rest()
    update(engine, batches)
    assert at_rest()


def test_a_trace_changes_no_bit(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    differing: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    masters = []
    for traced in (False, True):
        engine, batches = start(**STREAMED), micro_batches(6)
        if traced:
            engine.trace(tmp_path / "step.json")
        for _ in range(3):
            update(engine, batches)
        masters.append(engine.master_state_dict())
    assert read_trace(tmp_path / "step.json").step.name == "step 2"
    assert differing(*masters) == []


def test_without_nvme_there_are_steps_and_computation(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    engine, batches = start(accumulation=1), micro_batches(2)
    engine.trace(str(tmp_path / "step.json"))
    update(engine, batches)
    update(engine, batches)
    trace = read_trace(tmp_path / "step.json")
    assert not [event for event in trace.events if event.track in ("read", "write", "fetch")]
    (backward,) = (event for event in trace.events if event.name == "backward blocks.1")
    (phase,) = (event for event in trace.events if event.name == "backward")
    assert trace.step.begin < phase.begin < backward.begin < backward.end < phase.end < trace.step.end


def test_what_cannot_be_written_is_told_when_it_is_asked_for(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    engine, batches = start(accumulation=1), micro_batches(3)
    for path, cause in [(tmp_path / "missing" / "step.json", "No such file"), (tmp_path, "Is a directory")]:
        with pytest.raises(TelemetryError, match=f"cannot be written to {path}: {cause}"):
            engine.trace(path)
        assert not engine._tiers.timeline.recording
    engine.trace(tmp_path / "step.json")
    with pytest.raises(EngineStateError, match=r"the trace to .*step\.json is in progress"):
        engine.trace(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()
    for _ in range(3):
        update(engine, batches)
    assert read_trace(tmp_path / "step.json").step.name == "step 2"
    engine.close()
    with pytest.raises(EngineStateError, match=r"trace was called after close\(\)"):
        engine.trace(tmp_path / "step.json")


def test_a_file_that_cannot_be_written_any_more_stops_no_training(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, batches = start(accumulation=1), micro_batches(3)
    path = tmp_path / "traces" / "step.json"
    path.parent.mkdir()
    engine.trace(path)
    path.unlink()
    path.parent.rmdir()
    update(engine, batches)
    with caplog.at_level(logging.ERROR, logger="zero3.observe.trace"):
        update(engine, batches)
    assert f"the trace of step 2 could not be written to {path}" in caplog.text
    update(engine, batches)
    assert engine.global_steps == 3


def test_a_step_that_an_exception_ends_is_written_as_far_as_it_went(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, batches, path = start(accumulation=1, **STREAMED), micro_batches(5), tmp_path / "step.json"
    engine.trace(path)
    inner = engine.module.blocks[2].up

    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "forward", fail)
        # This fails in the step before the one that is traced whole.
        with pytest.raises(RuntimeError, match="no more"):
            update(engine, batches)
    assert path.read_bytes() == b""
    update(engine, batches)
    with monkeypatch.context() as patch:
        patch.setattr(inner, "forward", fail)
        with pytest.raises(RuntimeError, match="no more"):
            update(engine, batches)
    trace = read_trace(path)
    assert trace.step.name == "step 2, ended by RuntimeError"
    (phase,) = (event for event in trace.of("compute") if event.name == "forward")
    assert phase.args == {"unfinished": True}
    assert phase.end == pytest.approx(trace.step.end, abs=EPSILON)
    assert trace.names("compute")["forward blocks.1"] == 1
    assert trace.names("compute")["step"] == 0
    path.unlink()
    engine.trace(path)  # and there may be another one
    update(engine, batches)
    update(engine, batches)
    assert read_trace(path).step.name == "step 3"


def test_a_transfer_that_failed_is_shown_with_its_error(
    start: Callable[..., Engine],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = FaultPlan((Fault("read", first=30, error=errno.ENXIO),))
    monkeypatch.setattr(tiers, "AioContext", lambda **options: AioContext(fault=faults, **options))
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(6)
    engine.trace(tmp_path / "step.json")
    with pytest.raises(SwapError, match="ENXIO"):  # noqa: PT012 (which step meets it depends on the plan)
        for _ in range(6):
            update(engine, batches)
    engine.close()
    trace = read_trace(tmp_path / "step.json")
    failed = [event for event in trace.of("read") if "error" in event.args]
    assert [event.args["error"] for event in failed] == ["ENXIO (No such device or address)"]
    assert "ended by" in trace.step.name


def test_close_writes_what_there_is(
    start: Callable[..., Engine], micro_batches: Callable[..., Iterator[Any]], tmp_path: Path
) -> None:
    engine, batches = start(accumulation=1, **STREAMED), micro_batches(2)
    engine.trace(tmp_path / "step.json")
    loss = engine(*next(batches))
    engine.backward(loss)
    engine.close()
    trace = read_trace(tmp_path / "step.json")
    assert trace.step.name == "step 1, ended by close()"
    assert trace.names("compute")["forward"] == trace.names("compute")["backward"] == 1
    assert trace.of("read")


def test_recomputed_forwards_lie_inside_of_the_backward_that_needs_them(
    start: Callable[..., Engine],
    small_model: Callable[[], Any],
    micro_batches: Callable[..., Iterator[Any]],
    tmp_path: Path,
) -> None:
    torch.manual_seed(3)
    model = small_model()
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda stream, plain=plain: torch.utils.checkpoint.checkpoint(
            plain, stream, use_reentrant=False
        )
    engine, batches = start(model, accumulation=1, **STREAMED), micro_batches(2)
    engine.trace(tmp_path / "step.json")
    update(engine, batches)
    update(engine, batches)
    names = read_trace(tmp_path / "step.json").names("compute")
    for index in range(3):
        assert names[f"forward blocks.{index}"] == names[f"backward blocks.{index}"] == 1
