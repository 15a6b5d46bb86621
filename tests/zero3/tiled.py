"""A small model whose layers are cut into tiles, and its training."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zero3.conftest import SmallModel, batches
from zero3.engine.engine import Engine

TILE = 16 << 10
"""Of the tied embedding and of ``up`` and ``down`` in bf16; the weights have 56 KiB and 18 KiB."""


def small() -> SmallModel:
    torch.manual_seed(3)
    return SmallModel()


def trained(engine: Engine, steps: int = 3) -> dict[str, Tensor]:
    for tokens, targets in batches(steps * engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    return engine.master_state_dict()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, values in expected.items() if not torch.equal(found[name], values)] == []
