"""What loops do between two steps, on ranks that keep whole gradients and on those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiering.errors import EngineStateError

from .models import Blocks, vectors
from .pool import Pool
from .training import start

Ranks = Callable[..., Pool]
STAGES = [0, 1, 2, 3]
NAME = "blocks.2.down.weight"


def two_backwards(rank: int, nvme: Path, stage: int, *, synced: bool) -> dict[str, Tensor]:
    """Two losses before each step, the first one in no_sync or not."""
    with start(nvme, Blocks, threshold=0, stage=stage) as engine:
        for shares in vectors(3, 2):
            first, second = shares[rank][0].chunk(2)
            if synced:
                engine.backward(engine(first))
            else:
                with engine.no_sync():
                    engine.backward(engine(first))
            norm = engine.get_global_grad_norm()
            engine.backward(engine(second))
            assert engine.get_global_grad_norm() != norm or not synced
            engine.step()
        return dict(engine.master_state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_two_backwards_before_a_step_add_up(ranks: Ranks, nvme: Path, stage: int) -> None:
    expected = ranks(2).run(two_backwards, nvme, stage, synced=False)
    outcomes = ranks(2).run(two_backwards, nvme, stage, synced=True)
    for name, master in expected[0].items():
        assert torch.equal(outcomes[0][name], outcomes[1][name]), name
        torch.testing.assert_close(outcomes[0][name], master, rtol=1e-5, atol=1e-7)


def dropped(rank: int, nvme: Path, stage: int, *, drop: bool) -> dict[str, Tensor]:
    """The first of two micro-batches is thrown away, or never was."""
    with start(nvme, Blocks, threshold=0, stage=stage, accumulation=2) as engine:
        for shares in vectors(3, 2):
            if drop:
                engine.backward(engine(shares[rank][0] * 7))
                engine.optimizer.zero_grad()
            engine.step() if drop else setattr(engine, "micro_steps", engine.micro_steps + 1)
            engine.backward(engine(*shares[rank]))
            engine.step()
        return dict(engine.master_state_dict())


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_drops_what_no_rank_has_reduced_yet(ranks: Ranks, nvme: Path, stage: int) -> None:
    expected = ranks(2).run(dropped, nvme, stage, drop=False)
    outcomes = ranks(2).run(dropped, nvme, stage, drop=True)
    assert all(torch.equal(outcomes[0][name], master) for name, master in expected[0].items())


def set_by_each(rank: int, nvme: Path, stage: int) -> list[Tensor]:
    with start(nvme, Blocks, threshold=0, stage=stage) as engine:
        shape = engine.get_fp32_parameter(NAME).shape
        engine.set_fp32_parameter(NAME, torch.full(shape, float(rank + 1)))
        engine.set_fp32_state(NAME, "exp_avg", torch.full(shape, float(rank + 3)))
        engine.backward(engine(next(vectors(1, 2))[rank][0]))
        engine.set_fp32_gradient(NAME, torch.full(shape, float(rank + 5)))
        return [
            engine.get_fp32_parameter(NAME),
            engine.get_fp32_state(NAME, "exp_avg"),
            engine.get_fp32_gradient(NAME),
        ]


@pytest.mark.parametrize("stage", STAGES)
def test_what_rank_0_sets_counts(ranks: Ranks, nvme: Path, stage: int) -> None:
    for values in ranks(2).run(set_by_each, nvme, stage):
        assert [value.unique().tolist() for value in values] == [[1.0], [3.0], [5.0]]


def asks_too_early(rank: int, nvme: Path, stage: int) -> str:
    with start(nvme, Blocks, threshold=0, stage=stage, accumulation=2) as engine:
        engine.backward(engine(next(vectors(1, 2))[rank][0]))
        try:
            engine.get_fp32_gradient(NAME)
        except EngineStateError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_not_reduced_yet_are_not_shown(ranks: Ranks, nvme: Path, stage: int) -> None:
    for message in ranks(2).run(asks_too_early, nvme, stage):
        assert ("use stage 2" in message) == (stage < 2)


def penalised(rank: int, nvme: Path, stage: int) -> Any:
    """torch.autograd.grad of an input before the backward that counts."""
    with start(nvme, Blocks, threshold=0, stage=stage, accumulation=2) as engine:
        for shares in vectors(4, 2):
            x = shares[rank][0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(engine(x), x)
            assert bool(slope.any())
            engine.backward(engine(*shares[rank]))
            engine.step()
        return dict(engine.master_state_dict()), engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_inputs_leave_those_of_parameters_alone(ranks: Ranks, nvme: Path, stage: int) -> None:
    (masters, norm), _ = ranks(2).run(penalised, nvme, stage)
    (expected, other), _ = ranks(2).run(penalised, nvme, 2)
    assert norm == pytest.approx(other, rel=1e-6)
    for name, master in expected.items():
        torch.testing.assert_close(masters[name], master, rtol=1e-5, atol=1e-7)
