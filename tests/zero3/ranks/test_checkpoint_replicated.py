"""What ranks hold alike is saved once, and a save holds up nothing that others save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.conftest import SmallModel, config
from tests.zero3.inside import saver_of
from tiering.checkpoint.reader import open_checkpoint
from zero3.checkpoint.saving import Saver

from .pool import Pool
from .training import start, tokens

Ranks = Callable[[int], Pool]


def train(engine: Any, rank: int, steps: int) -> None:
    for shares in tokens(steps, 2):
        engine.backward(engine(*shares[rank]))
        engine.step()


def stepped_before_the_end(
    rank: int, nvme: Path, directory: Path, options: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether a step passed a save that had copied all that is its own, but had not ended."""
    stepped, copy, passed = threading.Event(), Saver._copy, []

    def copied(self: Saver, writers: Any) -> None:
        copy(self, writers)
        passed.append(stepped.wait(20))

    with pytest.MonkeyPatch.context() as patch, start(nvme, **options) as engine:
        train(engine, rank, 1)
        patch.setattr(Saver, "_copy", copied)
        saving = engine.save_checkpoint(directory, background=True)
        others = bool(saver_of(engine)._share.saved_elsewhere)
        train(engine, rank, 1)
        stepped.set()
        saving.wait()
    return passed == [True], others


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_waits_for_no_tile_that_another_rank_saves(
    ranks: Ranks, nvme: Path, tmp_path: Path, stage: int
) -> None:
    options = {"stage": stage, "sub_group_size": 2048}
    outcomes = ranks(2).run(stepped_before_the_end, nvme, tmp_path / "saved", options)
    assert outcomes == [(True, stage == 0)] * 2


def with_client(nvme: Path) -> Any:
    torch.manual_seed(3)
    model = SmallModel()
    client = torch.optim.NAdam(model.parameters(), lr=1e-3)
    settings = config(nvme, rule=None, stage=0, accumulation=1)
    return tiering.initialize(model=model, config=settings, optimizer=client).engine


def saved_and_loaded(rank: int, nvme: Path, directory: Path) -> list[int]:
    with with_client(nvme) as engine:
        train(engine, rank, 2)
        path = engine.save_checkpoint(directory).path
        expected = [state["exp_avg"] for state in engine.optimizer.state.values()]
        with with_client(nvme) as other:
            other.load_checkpoint(directory)
            loaded = [state["exp_avg"] for state in other.optimizer.state.values()]
        assert len(loaded) == len(expected) > 0
        assert all(first.equal(two) for first, two in zip(loaded, expected, strict=True))
    return [
        sum(name.startswith("optimizer") for name in open_checkpoint(path).rank(of).tensors.tensors)
        for of in (0, 1)
    ]


def test_the_state_of_a_client_optimizer_is_saved_by_the_first_rank(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    for first, second in ranks(2).run(saved_and_loaded, nvme, tmp_path / "saved"):
        assert first > 0
        assert second == 0
