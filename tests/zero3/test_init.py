"""zero.Init: no memory while building, the ordinary build's weights afterwards, and no silent loss of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from tiering.errors import ConfigError, EngineStateError

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


class Everything(nn.Module):
    """Layers with the ways of initialising that torch's own modules have, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("ramp", torch.linspace(0, 1, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream)
        return self.head(self.norm(stream)).float().pow(2).mean()


@pytest.mark.parametrize("placement", [{}, STREAMED])
def test_same_seed_gives_the_weights_of_an_ordinary_build(
    start: Callable[..., Any], placement: dict[str, Any]
) -> None:
    torch.manual_seed(11)
    ordinary = Everything()
    with tiering.zero.Init():
        model = Everything()
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.ramp, ordinary.ramp)
    torch.manual_seed(11)
    engine = start(model, threshold=20, **placement)
    masters = engine.master_state_dict()
    for name, parameter in ordinary.named_parameters():
        assert torch.equal(masters[name], parameter.detach()), name
    engine.backward(engine(torch.tensor([[1, 2, 3]])))


def test_values_given_outside_reset_parameters_are_not_lost_in_silence(start: Callable[..., Any]) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            nn.init.constant_(self.weight, 2.0)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    with tiering.zero.Init():
        scaled, bare, applied = Scaled(), Bare(), nn.Sequential(nn.Linear(4, 4))
        applied.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    for model, name in ((scaled, "weight"), (bare, "gain"), (applied, "0.weight")):
        with pytest.raises(ConfigError, match="reset_parameters") as refusal:
            start(model)
        assert name in str(refusal.value)


def test_the_context_ends_also_after_an_error_and_is_not_reentrant() -> None:
    with pytest.raises(ZeroDivisionError), tiering.zero.Init():
        _ = 1 / 0
    assert not nn.Linear(2, 2).weight.is_meta
    with tiering.zero.Init(), pytest.raises(EngineStateError, match="open already"), tiering.zero.Init():
        pass
    assert not nn.Linear(2, 2).weight.is_meta
