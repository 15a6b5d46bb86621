"""Partitions: ranks that hold the same part of a model divide its state, and other ranks hold other parts.

Each two of four ranks train one model. They are to be left with what two ranks alone are left with, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.zero3.conftest import SmallModel
from zero3.ranks.mesh import MeshPlace, Partition

from .pool import Pool
from .test_lost import die
from .training import Trained, start, tokens, train, trained_state

Ranks = Callable[[int], Pool]

STAGES = (Partition((0, 2), "pipe 0"), Partition((1, 3), "pipe 1"))
"""Of a mesh ("data", "pipe"): the ranks of a partition do not follow each other."""
ALIKE: dict[str, Any] = {"clip": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 2": {"stage": 2, "accumulation": 2, "offload_optimizer": "cpu"},
    "stage 3": {"stage": 3, "offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3, deferred": {"stage": 3, "precision": "bf16", "step": "deferred", "offload_optimizer": "nvme"},
}


def place(rank: int) -> MeshPlace:
    data, pipe = divmod(rank, 2)
    return MeshPlace(data, 2, coordinate={"data": data, "pipe": pipe}, partitions=STAGES)


def build(pipe: int) -> nn.Module:
    """Another model for each place along the pipe: other values, and another number of layers."""
    torch.manual_seed(17 + pipe)
    return SmallModel(layers=2 + pipe)


def begin(rank: int, nvme: Path, **case: Any) -> Any:
    with mock.patch("zero3.initialize.place_of", return_value=place(rank)):
        return start(nvme, partial(build, rank % 2), **ALIKE, **case)


def train_a_part(rank: int, nvme: Path, **case: Any) -> Trained:
    engine, losses, norms = begin(rank, nvme, **case), [], []
    with engine:
        for number, shares in enumerate(tokens(3 * engine.settings.gradient_accumulation_steps, 2), start=1):
            loss = engine(*shares[rank // 2])
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            if number % engine.settings.gradient_accumulation_steps == 0:
                norms.append(engine.get_global_grad_norm())
        assert engine.get_batch_info()[0] == engine.settings.micro_batch_size * 2 * (
            engine.settings.gradient_accumulation_steps
        )
        return trained_state(engine, losses, norms)


@pytest.mark.parametrize("case", CASES)
def test_each_part_is_trained_as_by_its_ranks_alone(ranks: Ranks, nvme: Path, case: str) -> None:
    together = ranks(4).run(train_a_part, nvme, **CASES[case])
    alone = [ranks(2).run(train, nvme, build=partial(build, pipe), **ALIKE, **CASES[case]) for pipe in (0, 1)]
    for rank, run in enumerate(together):
        expected = alone[rank % 2][rank // 2]
        assert run.losses == expected.losses
        assert run.masters.keys() == expected.masters.keys()
        for name, values in (expected.masters | expected.weights).items():
            found = (run.masters | run.weights)[name]
            assert torch.equal(found, values), name
    # The norm is that of the whole model, whose parts are on both.
    for step, norm in enumerate(together[0].norms):
        parts = [runs[0].norms[step] for runs in alone]
        assert norm == pytest.approx(math.hypot(*parts), rel=1e-12)
    assert all(run.norms == together[0].norms for run in together)


def train_until_one_dies(rank: int, nvme: Path) -> None:
    with begin(rank, nvme, stage=3) as engine:
        for number, shares in enumerate(tokens(100, 2)):
            if (rank, number) == (3, 2):
                die()
            engine.backward(engine(*shares[rank // 2]))
            engine.step()


def test_a_rank_that_dies_ends_the_other_parts_too(doomed: Ranks, nvme: Path) -> None:
    *survivors, _ = doomed(4).outcomes(train_until_one_dies, nvme)
    for outcome in survivors:
        assert outcome.error is not None and outcome.error.kind == "RankLostError", outcome.report()
        assert "rank 3 (data 1, pipe 1, host " in outcome.error.message
