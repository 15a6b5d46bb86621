"""Whoever is slow, and wherever: nobody deadlocks, and no bit changes. Seeded pauses on every rank, at every place.

They fall before and after each forward and backward of a module, each call that goes to other ranks, and each read and
write of swap space, so that ranks and their threads meet in orders that they would not take by themselves.
"""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor, nn

from tests.zero3.conftest import SmallModel
from tiering.storage.swap_space import SwapSpace
from zero3.ranks import collectives, tables, watch

from . import models
from .pool import Pool
from .training import STEPS, Trained, train

Ranks = Callable[[int], Pool]
LONGEST = 0.02  # seconds
CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1, nvme": {"stage": 1, "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 2": {"stage": 2, "accumulation": 2},
    "stage 3": {},
    "stage 3, host": {"offload_param": "cpu", "offload_optimizer": "cpu", "precision": "bf16"},
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 3, nothing persistent": {"threshold": 0, "accumulation": 2, "precision": "bf16"},
    "stage 3, no prefetch": {"prefetch": 0, "threshold": 0},
    "experts": {
        "build": models.Mixture,
        "data": models.Choices((0, 1), (2,), (1, 3), (0,)),
        "threshold": 30,
    },
    "unused on some ranks": {
        "build": models.Blocks,
        "data": models.Choices((0, 1), (1, 2), (0, 2), (0, 1, 3)),
        "stage": 2,
        "threshold": 0,
    },
}


class Pauses:
    """Mostly none, now and then a long one: so that somebody is far behind, and not everybody a little."""

    def __init__(self, seed: int, rank: int) -> None:
        self._random = random.Random(f"{seed} on rank {rank}")
        self.count = 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self._random.random() < 1 / 16:
            time.sleep(LONGEST * self._random.random())

    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self()
        if output.requires_grad:
            output.register_hook(self)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def slow(*args: Any, **kwargs: Any) -> Any:
            self()
            try:
                return function(*args, **kwargs)
            finally:
                self()

        return slow

    def around_all(self, owner: type | ModuleType, patch: pytest.MonkeyPatch) -> None:
        """Every function of a class, or of a module and its classes."""
        for name, value in list(vars(owner).items()):
            if inspect.isfunction(value) and not name.startswith("__"):
                patch.setattr(owner, name, self.around(value))
            elif inspect.isclass(value) and value.__module__ == getattr(owner, "__name__", ""):
                self.around_all(value, patch)


def train_slowly(rank: int, nvme: Path, seed: int, **options: Any) -> tuple[Trained, int]:
    pauses = Pauses(seed, rank)
    build = options.pop("build", None)

    def built() -> nn.Module:
        model: nn.Module = build() if build else SmallModel()
        for module in model.modules():
            module.register_forward_pre_hook(pauses)
            module.register_forward_hook(pauses.after_forward)
        return model

    with pytest.MonkeyPatch.context() as patch:
        for module in (collectives, tables, watch):
            pauses.around_all(module, patch)
        for name in ("swap_in", "swap_out"):
            patch.setattr(SwapSpace, name, pauses.around(getattr(SwapSpace, name)))
        return train(rank, nvme, build=built, **options), pauses.count


def assert_no_difference(pool: Pool, nvme: Path, seed: int, **case: Any) -> None:
    undelayed = pool.run(train, nvme, **case)
    slow = pool.run(train_slowly, nvme, seed, **case)
    for rank, ((run, count), expected) in enumerate(zip(slow, undelayed, strict=True)):
        assert run.differing(expected) == [], f"rank {rank}"
        assert count > 20 * STEPS, "the pauses are elsewhere"


FAST = ["stage 1, nvme", "stage 2", "stage 3, nvme", "stage 3, nothing persistent", "experts"]


@pytest.mark.parametrize("case", FAST)
def test_two_ranks_with_pauses(ranks: Ranks, nvme: Path, case: str) -> None:
    assert_no_difference(ranks(2), nvme, 1, **CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_many_pauses(ranks: Ranks, nvme: Path, case: str, world_size: int) -> None:
    for seed in range(10, 18):
        assert_no_difference(ranks(world_size), nvme, seed, **CASES[case])
