"""Calls of save_checkpoint and load_checkpoint: where scripts for DeepSpeed have arguments, and what is told."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.zero3.inside import saver_of
from tests.zero3.resuming import Model, train
from tiering.errors import CheckpointError


def begin(start: Callable[..., Any]) -> Any:
    return start(Model(), precision="bf16", accumulation=1, threshold=40)


def test_arguments_stand_where_deepspeed_has_them(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = begin(start)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, "first", {"epoch": 1}, True, False)
    train(engine, range(1, 2))
    engine.save_checkpoint(tmp_path, "second", {"epoch": 2}, False)
    path, state = engine.load_checkpoint(tmp_path, None, True, False, True, False, None)
    assert (path, state) == (str(tmp_path / "first"), {"epoch": 1})
    assert engine.global_steps == 2, "load_optimizer_states=False leaves counters"
    assert engine.load_checkpoint(
        tmp_path, tag="second", load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )[1] == {"epoch": 2}  # fmt: skip


@pytest.mark.parametrize("room", [None, 6000])
def test_a_save_in_the_background_is_done_without_another_step(
    start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int | None
) -> None:
    """A loop that asks while it does something else sees it, and reads it in the log."""
    caplog.set_level(logging.INFO, "zero3.checkpoint.checkpoints")
    engine = begin(start)
    with limited(room):
        saving = engine.save_checkpoint(tmp_path / "saved", background=True)
        deadline = time.monotonic() + 60
        while not saving.done and time.monotonic() < deadline:
            time.sleep(0.01)
    assert saving.done
    messages = [record.getMessage() for record in caplog.records if "saved" in record.getMessage()]
    if room is None:
        assert saving.error is None
        assert (saving.path / "checkpoint.json").is_file()
        assert saving.nbytes > 0
        assert saving.seconds >= saving.stalled > 0
        assert [line for line in messages if line.startswith(f"checkpoint {saving.path} saved: ")] == messages
        train(engine, range(1))
        saving.wait()
        engine.close()
    else:
        assert isinstance(saving.error, CheckpointError)
        assert [line for line in messages if "was not saved" in line] == messages
        assert [path.name for path in (tmp_path / "saved").iterdir()] == [".lock"]
        train(engine, range(1))
        with pytest.raises(CheckpointError):
            engine.close()
    assert len(messages) == 1


def test_a_save_that_failed_unseen_does_not_hide_what_ends_the_block(
    start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (KeyboardInterrupt, None):
        with pytest.raises(error or CheckpointError), begin(start) as engine:  # noqa: PT012 (close() is in the block's end)
            with limited(6000):
                engine.save_checkpoint(tmp_path / "saved", background=True)
                saver_of(engine).join()
            if error is not None:
                raise error
        assert "was not saved" in caplog.text
        caplog.clear()


def test_a_save_that_ranks_never_agreed_on_is_named_when_the_script_ends() -> None:
    program = (
        "import pathlib; from zero3.checkpoint import saving as s;"
        " s.uncommitted.add(pathlib.Path('runs/7/global_step500'))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "checkpoint runs/7/global_step500 is not committed" in process.stderr


@contextmanager
def limited(room: int | None) -> Iterator[None]:
    """No file may grow beyond ``room`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if room is None else room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
