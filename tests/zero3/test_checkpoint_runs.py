"""Runs that share a directory: each removes and replaces what it has saved itself, whoever has gone on from whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from tiering.checkpoint.manifest import run_of
from tiering.errors import CheckpointError
from zero3.engine import Engine

from .conftest import config

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


def test_a_run_that_begins_anew_leaves_another_ones_checkpoints(begin: Begin, runs: Path) -> None:
    old = begin()
    train(old, runs, 3)
    old.close()
    new = begin()
    with pytest.raises(CheckpointError, match=r"global_step1 is a checkpoint of another run"):
        train(new, runs, 1)
    train(new, runs / "its own", 2)
    assert saved(runs) == {"global_step1", "global_step2", "global_step3", "its own"}
    assert run_of(runs / "global_step1") != run_of(runs / "its own" / "global_step1")


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
    with pytest.raises(CheckpointError, match="another run"):
        train(new, runs, 1)
    new.save_checkpoint(runs, "mine", keep=1)
    assert saved(runs) == {"global_step1", "global_step2", "mine"}
