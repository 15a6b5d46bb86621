"""Weights that a tensor subclass wraps, with several ranks: sharded as bytes, and gathered to the same weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiering
from tests.zero3.wrapped import WIDTH, Coded, Model

from .pool import Pool
from .training import Trained, start, train

Ranks = Callable[[int], Pool]
PLACES: list[dict[str, Any]] = [
    {},
    {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
]


class Losses(Model):
    """Other bits on each rank: those of rank 0 count."""

    def __init__(self) -> None:
        super().__init__(torch.float32, seed=4 + int(os.environ.get("RANK", "0")))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2).mean()


def inputs(count: int, world_size: int) -> Any:
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield [(rows,) for rows in torch.randn(world_size, 3, WIDTH, generator=generator)]


def trained(rank: int, nvme: Path, place: dict[str, Any]) -> Trained:
    return train(rank, nvme, build=Losses, data=inputs, threshold=0, **place)


def shown(rank: int, nvme: Path) -> tuple[bool, Tensor, Tensor]:
    """Whether a gathered weight is the wrapper, and what is in it; then what is in it after a release."""
    with start(nvme, Losses, threshold=0, **PLACES[1]) as engine:
        weight = engine.module.blocks[1].up.weight
        with tiering.gathered(weight):
            codes = weight.codes.clone()
            is_wrapper = type(weight) is Coded
        engine.release()
    return is_wrapper and type(weight.codes) is Tensor, codes, weight.codes


@pytest.mark.slow
def test_no_placement_changes_a_bit(ranks: Ranks, nvme: Path) -> None:
    runs = [run for place in PLACES for run in ranks(2).run(trained, nvme, place)]
    assert all(runs[0].differing(run, losses=False) == [] for run in runs)
    assert runs[0].losses == runs[2].losses and runs[1].losses == runs[3].losses
    own = Model(torch.float32).blocks[1].up.weight
    assert torch.equal(runs[1].weights["blocks.1.up.weight.codes"], own.codes)
    assert torch.equal(runs[1].weights["blocks.1.up.weight.scale"], own.scale)
    for is_wrapper, gathered, released in ranks(2).run(shown, nvme):
        assert is_wrapper and torch.equal(gathered, own.codes) and torch.equal(released, own.codes)
