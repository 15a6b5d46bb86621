"""Hyperparameters that differ between ranks from some step on: an error on every rank, before anything is updated."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from . import models
from .pool import Pool
from .training import start

Ranks = Callable[..., Pool]


def own_plateau(engine: Any, rank: int, step: int) -> None:
    """The classic: each rank's scheduler follows the rank's own loss."""
    if step == 0:
        engine.plateau = ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5)
    engine.plateau.step(1.0 + (step if rank else -step / 4))


def edited_lr(engine: Any, rank: int, step: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.25 * (1 + rank * (step == 1))


def edited_decay(engine: Any, rank: int, step: int) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = torch.tensor(0.25 * (1 + rank * (step == 1)))


def edited_betas(engine: Any, rank: int, step: int) -> None:
    engine.optimizer.param_groups[0]["betas"] = (0.5 if rank and step == 1 else 0.25, 0.5)


def alike(engine: Any, rank: int, step: int) -> None:
    """Other objects, equal numbers; what no rule reads may differ."""
    lr = 0.125 / (1 + step)
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(lr) if rank else lr
    engine.optimizer.param_groups[0]["remark"] = f"of rank {rank}"


def steps(rank: int, nvme: Path, edit: Callable[..., None], **options: Any) -> dict[str, int]:
    """Three steps; ``edit`` is called after each. What was sent by then, as numbers of operations."""
    engine = start(nvme, models.Blocks, threshold=0, **options)
    calls: dict[str, int] = {}
    for step, shares in enumerate(models.vectors(3, 2)):
        engine.backward(engine(*shares[rank]))
        before = engine._collectives.calls.copy()
        engine.step()
        calls = dict(engine._collectives.calls - before)
        edit(engine, rank, step)
    engine.close()
    return calls


EDITS = [
    (edited_lr, "lr 0.25", "lr 0.5"),
    (edited_decay, "weight_decay 0.25", "weight_decay 0.5"),
    (edited_betas, "betas (0.25, 0.5)", "betas (0.5, 0.5)"),
    (own_plateau, "lr", "lr"),
]


@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_every_rank_is_told_both_values(doomed: Ranks, nvme: Path, stage: int) -> None:
    for edit, first, other in EDITS:
        for outcome in doomed(2).outcomes(steps, nvme, edit, stage=stage):
            assert outcome.error is not None and outcome.error.kind == "ConfigError", outcome.report()
            match = re.search(
                r"has (.*) in param group 0 on rank 0, and (.*) in param group 0 on rank 1",
                outcome.error.message,
            )
            assert match is not None and match[1] != match[2], outcome.error
            assert (match[1].startswith(first), match[2].startswith(other)) == (True, True), outcome.error
            assert "in step 3" in outcome.error.message


def test_equal_values_train_and_the_comparison_costs_no_collective(ranks: Ranks, nvme: Path) -> None:
    for calls in ranks(2).run(steps, nvme, alike, stage=3):
        assert calls["control"] == 1
