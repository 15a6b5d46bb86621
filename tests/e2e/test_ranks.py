"""Architectures that nobody here wrote, on two ranks: as one process that sees both ranks' batches, within rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from tests.zero3.ranks.pool import Pool, Pools
from tests.zero3.ranks.training import Trained, assert_rounding_only, trained_state

from .architectures import batches, build
from .conftest import Habit, settings

WORLD_SIZE, STEPS, CLIP = 2, 4, 1.0
# SGD's updates are smooth in their gradients.
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
NAMES = ["gpt2", "llama", "mixtral", "mixture", "whisper"]
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 1": (1, {}),
    "stage 1, nvme": (1, {"offload_optimizer": "nvme", "cache_in_host": False}),
    "stage 3": (3, {}),
    "stage 3, nvme": (3, {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}),
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pools = Pools(tmp_path_factory.mktemp("ranks"))
    yield pools.of(WORLD_SIZE)
    pools.close()


def train(rank: int, nvme: Path, name: str, stage: int, options: dict[str, Any]) -> Trained:
    config = settings(nvme, Habit("fp32", 1), optimizer={"type": "SGD", "params": SGD}, **options)
    config["zero_optimization"]["stage"] = stage
    losses, norms = [], []
    with tiering.initialize(model=build(name), config=config).engine as engine:
        for number, batch in enumerate(batches(name, STEPS * WORLD_SIZE)):
            if number % WORLD_SIZE != rank:
                continue
            loss = engine(**batch).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        return trained_state(engine, losses, norms)


def train_plainly(name: str, dtype: torch.dtype) -> Trained:
    """One process for which each rank's batch is a micro-batch."""
    model = build(name).to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one knows no fp64
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(named.values(), **SGD)
    losses, norms = [], []
    total = 0.0
    for number, batch in enumerate(batches(name, STEPS * WORLD_SIZE, dtype), start=1):
        loss = model(**batch).loss
        total += loss.item() / WORLD_SIZE
        (loss / WORLD_SIZE).backward()
        if number % WORLD_SIZE == 0:
            losses.append(total)
            total = 0.0
            norms.append(float(nn.utils.clip_grad_norm_(named.values(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    return Trained(losses, norms, {key: p.detach() for key, p in named.items()}, model.state_dict())


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=pytest.mark.slow) for place in [*PLACES][:-1]] + [*PLACES][-1:]
)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_differ_from_one_process_by_rounding(
    pool: Pool, tmp_path: Path, name: str, place: str
) -> None:
    runs = pool.run(train, tmp_path, name, *PLACES[place])
    exact = train_plainly(name, torch.float64)
    assert len({*exact.norms}) == STEPS, "it does not train"
    assert_rounding_only(runs, train_plainly(name, torch.float32), exact)
    assert runs[1].differing(runs[0], losses=False) == []
    assert [bool(run.written) for run in runs] == ["nvme" in place] * WORLD_SIZE
