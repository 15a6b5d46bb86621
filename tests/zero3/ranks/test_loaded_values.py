"""load_state_dict and state_dict of sharded parameters: all ranks call them together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero3.plain import differing
from tiering.errors import PlacementError
from zero3.state import whole_copies

from .pool import Pool
from .training import start, tokens

Ranks = Callable[..., Pool]
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "nvme": {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
    "stage 2": {"stage": 2},
}


def step(engine: Any, rank: int) -> None:
    for shares in tokens(1, 2):
        engine.as_module()(*shares[rank]).backward()
        engine.as_optimizer().step()


def values(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    state = {
        name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in model.named_parameters()
    }
    return state | {"head.weight": state["embedding.weight"]}


def load(rank: int, nvme: Path, options: dict[str, Any]) -> tuple[list[str], dict[str, Tensor]]:
    """What differs from the values after their load, and the masters one step later."""
    with start(nvme, **options) as engine:
        step(engine, rank)
        engine.as_module().load_state_dict(values(engine.module))
        wrong = differing(dict(engine.as_module().state_dict()), values(engine.module))
        step(engine, rank)
        return wrong, engine.master_state_dict()


@pytest.mark.parametrize("place", PLACES)
def test_values_are_loaded(ranks: Ranks, nvme: Path, place: str) -> None:
    (wrong, masters), (wrong_too, others) = ranks(2).run(load, nvme, PLACES[place])
    assert wrong == wrong_too == []
    assert differing(masters, others) == []


def refuse(rank: int, nvme: Path) -> list[str]:
    """Only rank 1 has no room."""
    available, messages = whole_copies.available_memory, []
    with start(nvme, **PLACES["nvme"]) as engine:
        whole_copies.available_memory = (lambda: 4096) if rank == 1 else available
        try:
            for call in (engine.as_module().state_dict, engine.state_dict, engine.master_state_dict):
                with pytest.raises(PlacementError) as refusal:
                    call()
                messages.append(str(refusal.value))
        finally:
            whole_copies.available_memory = available
        step(engine, rank)
        assert engine.global_steps == 1
        return messages


def test_all_ranks_refuse_copies_where_one_has_no_room(ranks: Ranks, nvme: Path) -> None:
    first, second = ranks(2).run(refuse, nvme)
    assert first == second
    assert ["2.00 KiB are free" in message for message in first] == [True] * 3
