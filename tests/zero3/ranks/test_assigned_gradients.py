"""Gradients that scripts assign on several ranks: every stage steps with them as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.passes.test_assigned_gradients import WEIGHT, TorchLoop
from tests.zero3.plain import CLIP, ROUNDING, STREAMED, Tower, differing, inputs
from tiering.errors import EngineStateError

from .pool import Pool
from .training import start

Ranks = Callable[[int], Pool]
STAGES: list[tuple[int, dict[str, Any]]] = [(0, {}), (1, {}), (2, {}), (3, {}), (3, STREAMED)]


def steps(model: nn.Module, backward: Callable[[Tensor], None], step: Callable[[], None]) -> None:
    """Of each kind: replaced and dropped after backward, assigned before it, twice without, and as usual."""
    params, batches = list(model.parameters()), inputs(3)
    backward(next(batches))
    for p in params[::3]:
        p.grad = torch.full(p.shape, 0.01)
    model.get_parameter(WEIGHT).grad = None
    step()
    for p in params[::2]:
        p.grad = torch.full(p.shape, 0.02)
    backward(next(batches))
    step()
    for p in params[1:]:
        p.grad = torch.full(p.shape, 100.0)
        p.grad = torch.full(p.shape, -0.03)
    step()
    last = next(batches)
    backward(-last)
    model.zero_grad()
    backward(-last)
    model.get_parameter(WEIGHT).grad = None
    backward(last)
    step()


def train(rank: int, nvme: Path, stage: int, placement: dict[str, Any]) -> dict[str, Tensor]:
    with start(nvme, Tower, stage=stage, threshold=0, clip=CLIP, **placement) as engine:
        steps(engine.module, lambda x: engine.backward(engine(x.chunk(2)[rank])), engine.step)
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters


@pytest.mark.parametrize(("stage", "placement"), STAGES)
def test_every_stage_steps_with_what_was_assigned(
    ranks: Ranks, nvme: Path, stage: int, placement: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    plain = TorchLoop(Tower())
    steps(plain.module, lambda x: plain.backward(plain(x)), plain.step)
    first, second = ranks(2).run(train, nvme, stage, placement)
    assert differing(first, second) == []
    for name, param in plain.module.named_parameters():
        assert float((first[name] - param.detach()).abs().max()) <= ROUNDING["fp32"][1], name


def differ(rank: int, nvme: Path, stage: int) -> str:
    with start(nvme, Tower, stage=stage, threshold=0) as engine:
        weight = engine.module.get_parameter(WEIGHT)
        with pytest.raises(EngineStateError) as refusal:
            weight.grad = torch.full(weight.shape, float(rank))
        return str(refusal.value)


def test_ranks_that_assign_different_gradients_are_told(ranks: Ranks, nvme: Path) -> None:
    for message in ranks(2).run(differ, nvme, 3):
        assert WEIGHT in message and "all_reduce" in message
