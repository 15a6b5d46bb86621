"""Ranks that were configured in different ways learn which setting it is, before anything moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import tiering
from tiering.errors import ConfigError, DistributedError
from zero3.ranks.joining import meet

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
    for other, part in (
        ({"learning_rate": 0.25}, "optimizer.lr 0.25 on rank 1, optimizer.lr 0.5 on rank 0"),
        ({"per_device_train_batch_size": 3}, "train_batch_size 6 on rank 1, train_batch_size 4 on rank 0"),
    ):
        for message in ranks(2).run(refused, ours, ours | other):
            assert f"the configuration of rank 1 differs from that of rank 0: {part}" in message


def without_tensorboard(rank: int) -> str:
    sys.modules["torch.utils.tensorboard"] = None  # as where it is not installed
    try:
        with pytest.raises((ConfigError, DistributedError)) as caught:
            tiering.initialize(
                args={"learning_rate": 0.1, "per_device_train_batch_size": 1},
                model=Blocks(),
                config=AUTO | {"tensorboard": {"enabled": True}},
            )
    finally:
        del sys.modules["torch.utils.tensorboard"]
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_only_the_first_rank_lacks_ends_all_at_once(doomed: Callable[..., Pool]) -> None:
    first, second = doomed(2).run(without_tensorboard)
    assert first.startswith("ConfigError") and "tensorboard" in first
    assert second.startswith("RankLostError") and "tensorboard" in second


def alone(rank: int) -> str:
    if rank == 1:
        return ""  # it has failed before it came to join
    with pytest.raises(DistributedError) as caught:
        meet("gloo", timedelta(seconds=1))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_told_of(doomed: Callable[..., Pool]) -> None:
    message, _ = doomed(2).run(alone)
    assert "not all ranks joined within 1 seconds" in message
    assert "see the output of these ranks" in message
