"""Monitors: what they write and where, what is refused before training, and that none of them ever ends training."""

from __future__ import annotations

import logging
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import tiering
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from zero3.observe import monitors
from zero3.observe.monitors import Monitor

LR = "Train/Samples/lr"
NAMED_CSV = "Train_Samples_lr.csv"
STALL = "Tiering/stall_seconds/optimizer state"


def whole(**sections: dict[str, Any]) -> TieringConfig:
    return TieringConfig(train_batch_size=1, micro_batch_size=1, monitor=sections)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    """``start(**sections)`` is a monitor of rank 0; the default is CSV files in the directory "job"."""
    monitors: list[Monitor] = []

    def make(**sections: dict[str, Any]) -> Monitor:
        chosen = sections or {
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
        }
        monitors.append(Monitor(whole(**chosen), 0))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.close()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``stand_in(module, run)`` puts something in a library's place and returns the calls that it gets."""
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("log", values, step))

        def finish(self) -> None:
            calls.append(("finish",))

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            calls.append(("writer", log_dir))

        def add_scalar(self, *event: Any) -> None:
            calls.append(event)

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    def init(**keywords: Any) -> Run:
        calls.append(("init", keywords))
        return Run()

    def put(name: str, *, run: bool = False) -> list[Any]:
        module = ModuleType(name)
        module.__file__ = "here"
        module.SummaryWriter, module.init = SummaryWriter, init
        module.run = Run() if run else None
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return put


def test_csv_files_are_deepspeeds(start: Callable[..., Monitor], tmp_path: Path) -> None:
    monitor = start()
    monitor.write_events([(LR, 0.001, 4), (STALL, 0.25, 4)])
    monitor.write_events([(LR, 0.0005, 8)])
    files = {path.name: path.read_bytes() for path in (tmp_path / "job").iterdir()}  # nobody has closed them
    assert files == {
        NAMED_CSV: b"step,lr\r\n4,0.001\r\n8,0.0005\r\n",
        "Tiering_stall_seconds_optimizer_state.csv": b"step,optimizer state\r\n4,0.25\r\n",
    }


def test_the_next_run_goes_on_behind_the_last_whole_row(
    start: Callable[..., Monitor], tmp_path: Path
) -> None:
    start().write_events([(LR, 0.001, 4), (LR, 0.002, 8)])
    file = tmp_path / "job" / NAMED_CSV
    rows = file.read_bytes().splitlines(keepends=True)
    everything = b"".join(rows)
    for length in range(len(everything) + 1):
        file.write_bytes(everything[:length])
        monitor = start()
        monitor.write_events([(LR, 0.5, 12)])
        monitor.close()
        rows_kept = max(1, everything[:length].count(b"\n"))  # the header is written anew
        assert file.read_bytes() == b"".join(rows[:rows_kept]) + b"12,0.5\r\n", length


def test_long_files_are_cut_where_the_last_row_is_torn(start: Callable[..., Monitor], tmp_path: Path) -> None:
    start().write_events([(LR, 1 / 3, samples) for samples in range(1000)])
    file = tmp_path / "job" / NAMED_CSV
    before = file.read_bytes()
    assert len(before) > 3 * 4096
    file.write_bytes(before + b"1000,0.3")
    start().write_events([(LR, 0.5, 1000)])
    assert file.read_bytes() == before + b"1000,0.5\r\n"


def test_a_full_disk_is_said_once_and_what_follows_it_is_whole(
    start: Callable[..., Monitor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = start()
    monitor.write_events([(LR, 0.001, 4)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for samples in (8, 12):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # in the middle of the second row
        try:
            monitor.write_events([(LR, 0.001, samples)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        # The publisher of another run in this process logs too.
        ours = [record for record in caplog.records if record.name == monitors.__name__]
        (message,) = [record.getMessage() for record in ours]
    assert message.startswith("csv_monitor could not be written (OSError: ")
    assert message.endswith("figures are missing there from now on; training continues")
    monitor.write_events([(LR, 0.002, 16)])
    assert (tmp_path / "job" / NAMED_CSV).read_bytes() == b"step,lr\r\n4,0.001\r\n16,0.002\r\n"


def test_a_directory_that_vanishes_is_said_once_and_made_again(
    start: Callable[..., Monitor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = start()
    for samples in range(6):
        monitor.write_events([(LR, 0.001, samples)])
        if samples in (1, 3):
            shutil.rmtree(tmp_path / "job")
    assert "the file was removed" in caplog.text
    assert len(caplog.records) == 1
    assert (tmp_path / "job" / NAMED_CSV).read_bytes() == b"step,lr\r\n5,0.001\r\n"


def test_tensorboard_gets_each_event_and_is_flushed(
    stand_in: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in("torch.utils.tensorboard")
    monkeypatch.chdir(tmp_path)
    monitor = Monitor(whole(tensorboard={"enabled": True}), 0)
    links = monitor.links
    monitor.write_events([(LR, 0.001, 4), ("mine", 7, 4)])
    monitor.close()
    monitor.close()
    directory = tmp_path / "DeepSpeedJobName"
    assert directory.is_dir()
    assert links == {"TensorBoard": str(directory)}
    assert calls == [
        ("writer", str(directory)),
        (LR, 0.001, 4),
        ("mine", 7.0, 4),
        ("flush",),
        ("close",),
    ]


def test_one_that_fails_is_left_out_and_the_others_go_on(
    start: Callable[..., Monitor],
    stand_in: Callable[..., list[Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in("torch.utils.tensorboard")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = start(tensorboard=section, csv_monitor=section)
    tried: list[Any] = []

    def fails(*event: Any) -> None:
        tried.append(event)
        raise TypeError("its thread has ended")

    monitor.writers["tensorboard"]._writer.add_scalar = fails
    for samples in (4, 8):
        monitor.write_events([(LR, 0.001, samples)])
    assert tried == [(LR, 0.001, 4)], "once: its writer does not recover"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "tensorboard could not be written (TypeError: " in caplog.text
    assert (tmp_path / "job" / NAMED_CSV).read_bytes() == b"step,lr\r\n4,0.001\r\n8,0.001\r\n"


def test_wandb_gets_a_run_of_ours(stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in("wandb")
    config = whole(wandb={"enabled": True, "team": "ours", "group": "tries"})
    monitor = Monitor(config, 0)
    assert monitor.links == {}, "a run that is offline has no URL"
    monitor.write_events([(LR, 0.001, 4), (STALL, 0.5, 4), (LR, 0.002, 8)])
    monitor.close()
    monitor.close()
    arguments = {"project": "deepspeed", "entity": "ours", "group": "tries"}
    assert calls == [
        ("init", arguments | {"config": config.model_dump(mode="json")}),
        ("log", {LR: 0.001, STALL: 0.5}, 4),
        ("log", {LR: 0.002}, 8),
        ("finish",),
    ]


def test_wandb_goes_on_with_the_run_of_the_program(
    stand_in: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = stand_in("wandb", run=True)
    monkeypatch.setattr(sys.modules["wandb"].run, "url", "https://wandb.ai/run", raising=False)
    monitor = Monitor(whole(wandb={"enabled": True}), 0)
    assert monitor.links == {"Weights & Biases": "https://wandb.ai/run"}
    monitor.write_events([(LR, 0.001, 4)])
    monitor.close()
    assert calls == [("log", {LR: 0.001}, 4)]


def test_a_run_that_wandb_refuses_is_a_matter_of_the_configuration(
    stand_in: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise RuntimeError("api_key not configured")

    stand_in("wandb")
    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(ConfigError, match=r"RuntimeError: api_key not configured.*WANDB_MODE=offline"):
        Monitor(whole(wandb={"enabled": True}), 0)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_library_that_is_missing_is_said_before_anything_is_moved(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in ("torch.utils.tensorboard", package):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    model = nn.Linear(4, 4)
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    with pytest.raises(ConfigError, match=rf"pip install {package}', or delete the section '{package}'"):
        tiering.initialize(model=model, config=config | {package: {"enabled": True}})
    tiering.initialize(model=model, config=config | {package: {"enabled": False}}).engine.close()
    monkeypatch.setenv("RANK", "1")
    Monitor(whole(**{package: {"enabled": True}}), 1)  # another rank does not need it


def test_a_directory_of_that_name_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """wandb itself makes one, where it has been used."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="wandb is only a directory here"):
        Monitor(whole(wandb={"enabled": True}), 0)
    sys.modules.pop("wandb")


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = {"enabled": True, "output_path": str(tmp_path / "file"), "job_name": "job"}
    with pytest.raises(ConfigError, match=r"csv_monitor: cannot write to .*/file/job \(Not a dir"):
        Monitor(whole(csv_monitor=section), 0)


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = Monitor(whole(csv_monitor=section), 1)
    monitor.write_events([(LR, 0.001, 4)])
    assert (monitor.enabled, list(tmp_path.iterdir())) == (False, [])
