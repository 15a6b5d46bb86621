"""Runs that share a directory: each removes what it has saved itself, and replaces that and what ended runs saved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from tests.zero3.conftest import config
from tiering.checkpoint.manifest import run_of
from tiering.errors import CheckpointError
from zero3.checkpoint.saving import Saver
from zero3.engine.engine import Engine

Begin = Callable[[], Engine]


@pytest.fixture
def begin(nvme: Path) -> Iterator[Begin]:
    engines: list[Engine] = []

    def beginning() -> Engine:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        engines.append(
            tiering.initialize(model=model, config=config(nvme, precision="fp32", accumulation=1)).engine
        )
        return engines[-1]

    yield beginning
    for engine in engines:
        engine.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def train(engine: Any, directory: Path, steps: int, **how: Any) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        engine.save_checkpoint(directory, **how)


def saved(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir()}


def test_a_script_that_is_run_again_replaces_the_tags_of_its_last_run(
    begin: Begin, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning; what it does not save again stays, also beyond the checkpoints that it keeps."""
    old = begin()
    train(old, runs, 3)
    old.close()
    theirs = run_of(runs / "global_step1")
    new = begin()
    train(new, runs, 2, keep=1)
    ours = run_of(runs / "global_step2")
    assert saved(runs) == {"global_step2", "global_step3"}
    assert run_of(runs / "global_step3") == theirs != ours
    assert (runs / "latest").read_text() == "global_step2"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"{runs / 'global_step1'} is a checkpoint of an earlier run, and is replaced")


def test_a_checkpoint_of_an_ended_run_stays_until_the_new_one_is_whole(begin: Begin, runs: Path) -> None:
    old = begin()
    train(old, runs, 1)
    old.close()
    theirs = run_of(runs / "global_step1")
    new = begin()
    new.backward(new(torch.ones(2, 4)).sum())
    new.step()
    with held_saves() as let_go:
        saving = new.save_checkpoint(runs, background=True)
        assert run_of(runs / "global_step1") == theirs
        reader = begin()
        assert reader.load_checkpoint(runs)[0] == str(runs / "global_step1")
        let_go()
        saving.wait()
    assert run_of(runs / "global_step1") != theirs

    def fail(*_: Any) -> None:
        raise CheckpointError("the disk is full")

    before = run_of(runs / "global_step1")
    again = begin()
    again.backward(again(torch.ones(2, 4)).sum())
    again.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "_copy", fail)
        with pytest.raises(CheckpointError, match="the disk is full"):
            again.save_checkpoint(runs)
    assert run_of(runs / "global_step1") == before


def test_a_run_that_goes_on_is_the_same_run(begin: Begin, runs: Path) -> None:
    old = begin()
    train(old, runs, 3)
    old.close()
    new = begin()
    new.load_checkpoint(runs, "global_step2")
    train(new, runs, 2, keep=2)
    assert saved(runs) == {"global_step3", "global_step4"}
    assert run_of(runs / "global_step3") == run_of(runs / "global_step4")


def test_who_takes_the_weights_alone_is_another_run(begin: Begin, runs: Path) -> None:
    old = begin()
    train(old, runs, 2)
    old.close()
    new = begin()
    new.load_checkpoint(runs, load_optimizer_states=False)
    new.save_checkpoint(runs, "mine", keep=1)
    assert saved(runs) == {"global_step1", "global_step2", "mine"}
    assert run_of(runs / "mine") != run_of(runs / "global_step1")


def test_an_engine_made_anew_saves_where_an_open_one_has_saved(begin: Begin, runs: Path) -> None:
    """As a notebook does, and a trainer that is built again over its output directory."""
    first = begin()
    train(first, runs, 2)
    second = begin()
    second.load_checkpoint(runs)
    train(second, runs, 2, keep=3)
    assert saved(runs) == {"global_step2", "global_step3", "global_step4"}
    assert second.global_steps == 4
    with pytest.raises(CheckpointError, match="another engine of this process is saving to"):
        save_while_saving(second, first, runs)
    train(second, runs, 1)
    second.close()
    third = begin()
    third.load_checkpoint(runs)
    assert third.global_steps == 5


@contextmanager
def held_saves() -> Iterator[Callable[[], None]]:
    """Saves copy nothing until the function is called, or the block ends."""
    let, copy = threading.Event(), Saver._copy

    def hold(*args: Any) -> None:
        assert let.wait(30)
        copy(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "_copy", hold)
        try:
            yield let.set
        finally:
            let.set()


def save_while_saving(first: Engine, other: Engine, directory: Path) -> None:
    """``first`` saves in the background, and has not ended when ``other`` begins."""
    with held_saves() as let_go:
        saving = first.save_checkpoint(directory, "held", background=True)
        try:
            other.save_checkpoint(directory, "other")
        finally:
            let_go()
            saving.wait()
    assert (directory / "held" / "checkpoint.json").is_file()


def test_two_models_of_one_program_share_a_directory_by_tags(begin: Begin, runs: Path) -> None:
    first, other = begin(), begin()
    for _ in range(2):
        train(first, runs, 1, tag="generator")
        train(other, runs, 1, tag="discriminator")
    assert saved(runs) == {"generator", "discriminator"}
    with pytest.raises(CheckpointError, match="of another engine of this process, which has saved it since"):
        other.save_checkpoint(runs, "generator")
    assert run_of(runs / "generator") != run_of(runs / "discriminator")
