"""Ranks that were configured in different ways learn which setting it is, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tiering
from tiering.errors import ConfigError

from .models import Blocks
from .pool import Pool

AUTO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {"stage": 3},
}


def refused(rank: int, ours: dict[str, float], theirs: dict[str, float]) -> str:
    with pytest.raises(ConfigError) as caught:
        tiering.initialize(args=theirs if rank else ours, model=Blocks(), config=AUTO)
    return str(caught.value)


def test_what_auto_came_to_on_another_rank_is_told_by_its_setting(ranks: Callable[..., Pool]) -> None:
    ours = {"learning_rate": 0.5, "per_device_train_batch_size": 2}
    for other, said in (
        ({"learning_rate": 0.25}, "optimizer.lr 0.25 there, optimizer.lr 0.5 on rank 0"),
        ({"per_device_train_batch_size": 3}, "train_batch_size 6 there, train_batch_size 4 on rank 0"),
    ):
        for message in ranks(2).run(refused, ours, ours | other):
            assert f"the configuration of rank 1 is not that of rank 0: {said}" in message
