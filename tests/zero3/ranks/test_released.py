"""release() with several ranks: whole parameters on each, and a next engine that shards them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.zero3.conftest import config
from tests.zero3.plain import differing
from tiering.errors import PlacementError, RankLostError
from zero3.state import whole_copies

from .pool import Pool
from .training import start, tokens

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "stage 3, nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 2": {"stage": 2},
}


def steps(engine: Any, rank: int) -> None:
    for shares in tokens(2, 2):
        engine.backward(engine(*shares[rank]))
        engine.step()


def train_twice(
    rank: int, nvme: Path, options: dict[str, Any]
) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """What differs after release, and after training again, from a model that the values were carried over to."""
    engine = start(nvme, precision="bf16", **options)
    model = engine.module
    steps(engine, rank)
    weights = engine.state_dict()
    engine.release()
    ordinary = all(type(param) is nn.Parameter for param in model.parameters())
    lost = differing(model.state_dict(), weights) if ordinary else ["class"]

    fresh = type(model)()
    fresh.load_state_dict({name: value.clone() for name, value in weights.items()}, assign=True)
    fresh.head.weight = fresh.embedding.weight
    masters = []
    for each in (model, fresh):
        settings = config(nvme, precision="bf16", **options)
        with tiering.initialize(model=each, config=settings).engine as again:
            steps(again, rank)
            steps(again, rank)
            masters.append(again.master_state_dict())
    return lost, differing(*masters), weights


@pytest.mark.parametrize("place", PLACES)
def test_training_again_after_release(ranks: Ranks, nvme: Path, place: str) -> None:
    (lost, parted, weights), (lost_too, parted_too, others) = ranks(2).run(train_twice, nvme, PLACES[place])
    assert lost == lost_too == parted == parted_too == []
    assert differing(weights, others) == []


def refuse(rank: int, nvme: Path) -> tuple[str, float]:
    """Only rank 1 has no room."""
    available = whole_copies.available_memory
    whole_copies.available_memory = (lambda: 4096) if rank == 1 else available
    with start(nvme, precision="bf16") as engine:
        steps(engine, rank)
        try:
            engine.release()
            message = ""
        except PlacementError as error:
            message = str(error)
        finally:
            whole_copies.available_memory = available
        steps(engine, rank)
        return message, float(torch.stack([v.sum() for v in engine.master_state_dict().values()]).sum())


def test_all_ranks_refuse_where_one_has_no_room(ranks: Ranks, nvme: Path) -> None:
    (first, total), (second, total_too) = ranks(2).run(refuse, nvme)
    assert first == second
    assert "2.00 KiB are free" in first
    assert total == total_too


def end_and_start_again(rank: int, nvme: Path, options: dict[str, Any]) -> list[list[str]]:
    """What differs from the engine's values: after destroy(), and in the engine of another initialize()."""
    engine = start(nvme, precision="bf16", **options)
    steps(engine, rank)
    masters = engine.master_state_dict()
    engine.destroy()
    lost = differing({name: param.data for name, param in engine.module.named_parameters()}, masters)
    settings = config(nvme, precision="bf16", **options)
    first = tiering.initialize(model=engine.module, config=settings).engine
    steps(first, rank)
    masters = first.master_state_dict()
    with tiering.initialize(model=first.module, config=settings).engine as again:
        parted = differing(again.master_state_dict(), masters)
        steps(again, rank)
    return [lost, parted]


@pytest.mark.parametrize("place", ["stage 3, nvme", pytest.param("stage 2", marks=pytest.mark.slow)])
def test_a_model_is_used_again(ranks: Ranks, nvme: Path, place: str) -> None:
    assert ranks(2).run(end_and_start_again, nvme, PLACES[place]) == [[[], []], [[], []]]


def fail_alone(rank: int, nvme: Path) -> tuple[bool, bool]:
    """Rank 0 fails in its loop, and destroys the engine without waiting for rank 1."""
    engine = start(nvme, precision="bf16")
    try:
        if rank == 0:
            raise ValueError("a batch of the user")
        steps(engine, rank)
    except (ValueError, RankLostError):
        engine.destroy()
    return engine.ended, engine._ready.released


def test_destroy_after_an_error_waits_for_nobody(doomed: Ranks, nvme: Path) -> None:
    assert doomed(2).run(fail_alone, nvme) == [(True, False), (True, False)]
