"""Whoever gets no gradients here: with little room for those on their way, ranks must not wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from tiering.placement.workload import Tier

from .models import WIDTH, Block, Choices, loss_of, vectors
from .pool import Pool
from .training import assert_as_emulated, start

Ranks = Callable[..., Pool]


class Adapted(nn.Module):
    """A frozen layer that all use, and a trained one beside it that some do."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        y = torch.tanh(self.base(x))
        return x + (self.adapter(y) if used else y)


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted() for _ in range(8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, only: tuple[int, ...]) -> Tensor:
        x = x.to(self.scale.dtype) * self.scale
        for number, block in enumerate(self.blocks):
            x = block(x, number in only)
        return loss_of(x)


class Segments(nn.Module):
    """Checkpoints of several blocks each: recomputing a segment's first block does not end the backward of its last."""

    REENTRANT = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = (x.to(self.scale.dtype) * self.scale).requires_grad_()
        return loss_of(checkpoint_sequential(self.blocks, 4, x, use_reentrant=self.REENTRANT))


class ReentrantSegments(Segments):
    REENTRANT = True


EVERY = tuple(range(8))


def needed(rank: int, nvme: Path, **options: Any) -> int:
    """Bytes on the device, on each rank, with all the room that a plan can use."""
    with start(nvme, Adapters, threshold=0, **options) as engine:
        total: int = engine.plan.total(Tier.DEVICE)
        return total


@pytest.mark.parametrize("room", ["least", "usual"])
@pytest.mark.parametrize(("stage", "prefetch"), [(1, 0), (2, 0), (3, 0), (3, 10**6)])
def test_adapters_may_be_unused_on_some_ranks(
    ranks: Ranks, nvme: Path, stage: int, prefetch: int, room: str
) -> None:
    """One rank waits for room; another, with nothing to reduce, must not be in a gather that the first never enters."""
    data = Choices(EVERY, (0, 7))
    case = {"stage": stage, "prefetch": prefetch}
    budget = 2 * (min(ranks(2).run(needed, nvme, **case)) - (room == "least"))
    case |= {"build": Adapters, "data": data, "threshold": 0, "device_budget": f"{budget}"}
    assert_as_emulated(ranks(2), nvme, limit=30, **case)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_first_gradient_may_come_later_on_some_ranks(ranks: Ranks, nvme: Path, stage: int) -> None:
    data = Choices(EVERY, (0, 1, 2, 3, 4))
    assert_as_emulated(
        ranks(2), nvme, limit=30, build=Adapters, data=data, threshold=0, stage=stage, prefetch=0
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_what_all_ranks_have_skipped_once_keeps_its_turn(ranks: Ranks, nvme: Path, stage: int) -> None:
    data = Choices(EVERY, (0, 1, 2, 3), EVERY, same=True)
    assert_as_emulated(ranks(2), nvme, limit=30, build=Adapters, data=data, threshold=0, stage=stage)


@pytest.mark.parametrize("build", [Segments, ReentrantSegments])
@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_segments_are_reduced_once(ranks: Ranks, nvme: Path, stage: int, build: Any) -> None:
    assert_as_emulated(
        ranks(2), nvme, limit=30, build=build, data=vectors, threshold=0, stage=stage, prefetch=0
    )
