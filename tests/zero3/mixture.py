"""Experts, and what else a batch may leave alone: a model of which not every part is used or trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Mixture(nn.Module):
    """Experts of which a batch uses one; a frozen layer; a module that is used twice; one that is never used."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        hidden = self.first(x)
        hidden = self.experts[expert](torch.tanh(hidden))
        hidden = self.twice(torch.tanh(self.twice(self.frozen(hidden))))
        return (hidden * self.scale).float().pow(2).mean()


def train_mixture(engine: Any, experts: list[int]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for expert in experts:
        loss = engine(torch.randn(4, 32, generator=generator).to(torch.bfloat16), expert)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def mixture() -> Mixture:
    torch.manual_seed(5)
    return Mixture()
