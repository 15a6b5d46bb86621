"""What a user asked to see: lines and events, whose figures are those of the run's own record."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
import zero3.observe.run_record
from tests.zero3.conftest import SmallModel, batches, config
from tiering import _logs
from tiering.storage.io_stats import FileStats
from zero3.engine.engine import Engine
from zero3.observe import observation
from zero3.observe.run_record import RunIdentity, RunRecord

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
SAMPLES = 4  # of a step: two micro-batches of two


@pytest.fixture
def start(nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """``start(asked, **config)``: what is asked to see, beside what the engines of other tests have."""
    engines: list[Engine] = []
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger(_logs.PROGRESS)
    before = logger.level, list(logger.handlers)

    def make(sections: dict[str, Any], **options: Any) -> Engine:
        torch.manual_seed(3)
        settings = config(nvme, **options) | sections
        engines.append(tiering.initialize(model=SmallModel(), config=settings).engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    logger.level, logger.handlers = before


def steps(engine: Engine, count: int, *, bad: int | None = None) -> Iterator[int]:
    """Train; gives the number of each step. The loss of step ``bad`` is infinite."""
    data = batches(count * engine.settings.gradient_accumulation_steps)
    for number in range(1, count + 1):
        for _ in range(engine.settings.gradient_accumulation_steps):
            loss = engine(*next(data))
            engine.backward(loss * torch.inf if number == bad else loss)
            engine.step()
        yield number


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about steps; another says at the start what this run is."""
    lines = [record.getMessage() for record in caplog.records if record.name == _logs.PROGRESS]
    return [line for line in lines if line.startswith("step ")]


def table(directory: Path) -> dict[str, dict[int, float]]:
    """Of each CSV file: the value at each count of samples."""
    tables = {}
    for path in directory.iterdir():
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header[0] == "step"
        tables[path.stem] = {int(samples): float(value) for samples, value in rows}
    return tables


def rates(files: list[list[FileStats]], direction: str) -> list[float]:
    """Bytes per second in which something was in flight, between each reading of the one path and the next."""
    stats = [getattr(file, direction) for (file,) in files]
    return [
        (now.bytes - before.bytes) / (now.busy_ns - before.busy_ns) * 1e9 if now.ops > before.ops else 0.0
        for before, now in pairwise(stats)
    ]


def test_events_are_what_the_record_says(start: Callable[..., Engine], tmp_path: Path) -> None:
    sections = {"csv_monitor": {"enabled": True, "job_name": "job"}, "wall_clock_breakdown": True}
    engine = start(sections, **STREAMED)
    norms, files = [], [engine._observation.record.files]
    for number in steps(engine, 3):
        norms.append(engine.get_global_grad_norm())
        files.append(engine._observation.record.files)
        engine.monitor.write_events([("mine", number, number)])
    snapshot = engine.snapshot()
    written = table(tmp_path / "job")
    assert written.pop("mine") == {1: 1.0, 2: 2.0, 3: 3.0}
    assert all([*values] == [SAMPLES, 2 * SAMPLES, 3 * SAMPLES] for values in written.values())
    columns = {name: [*values.values()] for name, values in written.items()}
    steps_of_record = snapshot.steps
    assert columns.pop("Train_Samples_train_loss")[-1] == snapshot.loss
    assert columns.pop("Train_Samples_lr") == [1e-3] * 3
    assert columns.pop("Train_Samples_gradient_norm") == norms
    assert columns.pop("Tiering_nvme_read_bytes") == [step.read_bytes for step in steps_of_record]
    assert columns.pop("Tiering_nvme_written_bytes") == [step.written_bytes for step in steps_of_record]
    for phase, attribute in (("forward", "forward"), ("backward", "backward"), ("step", "update")):
        milliseconds = [1e3 * getattr(step, attribute) for step in steps_of_record]
        assert columns.pop(f"Train_Samples_elapsed_time_ms_{phase}") == pytest.approx(milliseconds)
    assert columns.pop("Tiering_step_seconds") == pytest.approx([step.seconds for step in steps_of_record])
    stalled = [name for name in columns if name.startswith("Tiering_stall_seconds_")]
    assert "Tiering_stall_seconds_parameters" in stalled
    causes = zip(*(columns.pop(name) for name in stalled), strict=True)
    assert [sum(seconds) for seconds in causes] == pytest.approx([step.stall for step in steps_of_record])
    for tier in snapshot.tiers:
        assert columns.pop(f"Tiering_used_bytes_{tier.name}")[-1] == tier.used > 0
    assert columns.pop("Tiering_nvme_read_bytes_per_second") == pytest.approx(rates(files, "read"))
    assert columns.pop("Tiering_nvme_written_bytes_per_second") == pytest.approx(rates(files, "write"))
    assert min(rates(files, "read")) > 0
    assert columns == {}


def test_lines_come_every_so_many_steps(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start({"steps_per_print": 2}, **STREAMED)
    figures = []
    for number in steps(engine, 5, bad=3):
        figures.append((engine._observation.record.loss, engine.get_global_grad_norm()))
        assert len(messages(caplog)) == number // 2
    rate = r"[\d.]+(e\+\d+)?"
    # What is written may still be under way when a line is told.
    moved = rf"NVMe read [\d.]+ [kM]B at {rate} [kMG]B/s, written [\d.]+ [kM]?B at {rate} [kMG]?B/s"
    for line, number, skipped in zip(messages(caplog), (2, 4), ("", ", 1 skipped"), strict=True):
        loss, norm = figures[number - 1]
        start_of_line = f"step {number}{skipped}: loss {loss:.5g}, gradient norm {norm:.4g}, lr 0.001, "
        assert line.startswith(start_of_line)
        assert re.fullmatch(rf"{rate} samples/s, {moved}, stalled [\d.]+ %", line.removeprefix(start_of_line))


def test_a_line_is_about_the_steps_since_the_last_one(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start({"steps_per_print": 2}, **STREAMED)
    for _ in steps(engine, 4):
        pass
    _, line = messages(caplog)
    steps_of_record = engine.snapshot().steps[-2:]
    seconds = sum(step.seconds for step in steps_of_record)
    assert f" {2 * SAMPLES / seconds:.4g} samples/s" in line
    assert f"read {sum(step.read_bytes for step in steps_of_record) / 1e6:.3g} MB" in line
    assert f"stalled {100 * sum(step.stall for step in steps_of_record) / seconds:.1f} %" in line


def test_a_batch_that_changes_counts_as_it_is(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sections = {"steps_per_print": 2, "csv_monitor": {"enabled": True, "job_name": "job"}}
    engine = start(sections, precision="fp32")
    for _ in steps(engine, 1):
        pass
    engine.set_train_batch_size(3 * SAMPLES)
    for number in steps(engine, 1):
        assert engine.global_steps == 1 + number
    (line,) = messages(caplog)
    seconds = sum(step.seconds for step in engine.snapshot().steps)
    assert f" {4 * SAMPLES / seconds:.4g} samples/s" in line
    written = table(tmp_path / "job")["Train_Samples_lr"]
    assert [*written] == [SAMPLES, engine.global_samples]


def test_fp16_shows_its_loss_scale(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sections = {"steps_per_print": 1, "csv_monitor": {"enabled": True, "job_name": "job"}}
    engine = start(sections, precision="fp16", fp16={"initial_scale_power": 4})
    for _ in steps(engine, 1):
        pass
    (line,) = messages(caplog)
    assert ", lr 0.001, loss scale 16, " in line
    assert "NVMe" not in line  # nothing lives there
    written = table(tmp_path / "job")
    assert written["Train_Samples_loss_scale"] == {SAMPLES: 16.0}
    assert not [name for name in written if "nvme" in name or "sent" in name]


def test_the_times_of_each_step_add_up(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start({"wall_clock_breakdown": True}, **STREAMED)
    for _ in steps(engine, 2):
        pass
    number = r"([\d.]+)"
    shape = (
        rf"step (\d): {number} ms a step: forward {number}, backward {number}, step {number}, between them {number}"
        rf"; stalled {number} \((?:[a-z ]+ [\d.]+(?:, )?)+\)"
    )
    for line, step_record in zip(messages(caplog), engine.snapshot().steps, strict=True):
        matched = re.fullmatch(shape, line)
        assert matched, line
        step, whole, *phases, stalled = (float(text) for text in matched.groups())
        assert (step, whole) == (step_record.step, pytest.approx(1e3 * step_record.seconds, abs=0.051))
        assert phases[:3] == pytest.approx(
            [1e3 * s for s in (step_record.forward, step_record.backward, step_record.update)], abs=0.051
        )
        assert sum(phases) == pytest.approx(whole, abs=0.3)
        assert stalled == pytest.approx(1e3 * step_record.stall, abs=0.051)


def test_nothing_asked_for_is_nothing_done(
    start: Callable[..., Engine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    engine = start({"csv_monitor": {"enabled": False}})
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(observation, "Totals", None)  # not to be counted
    for _ in steps(engine, 1):
        pass
    assert (messages(caplog), sorted(tmp_path.iterdir())) == ([], before)


def test_the_first_step_begins_with_its_first_forward(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        now = 100.0

        def time(self) -> float:
            return 0.0

        def perf_counter(self) -> float:
            return self.now

        def monotonic_ns(self) -> int:
            return 0

    engine, clock = start({}), Clock()
    monkeypatch.setattr(zero3.observe.run_record, "time", clock)
    monkeypatch.setattr(zero3.device.timeline, "time", clock)
    record = RunRecord(RunIdentity("first"), engine._tiers, engine._schedule.activations)
    for began, took in ((200.0, 3.0), (210.0, 5.0)):
        clock.now = began
        with record.phases.running("forward"):
            clock.now += took
        record.end_step()
    assert [(step.seconds, step.forward) for step in record.snapshot().steps] == [(3.0, 3.0), (12.0, 5.0)]
    assert (record.elapsed, dict(record.seconds)["forward"]) == (15.0, 8.0)


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ([0.001, 0.001], "0.001"),
        ([3e-5, 0.00012345], "3e-05 0.0001234"),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "1 2 3 4 and 2 more"),
    ],
)
def test_rates_are_shown_once_if_they_are_alike(rates: list[float], shown: str) -> None:
    assert observation._rates(rates) == shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 "), (999, "999 "), (999.6, "1 k"), (45e6, "45 M"), (3.217e9, "3.22 G"), (2.5e16, "2.5e+04 T")],
)
def test_bytes_are_decimal_as_those_of_drives(number: float, shown: str) -> None:
    assert observation._decimal(number) == shown
