"""A model of routed experts whose norms, routers and head may be in another dtype than the rest of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, EXPERTS, LAYERS = 32, 4, 3
KEEP = ["norm", "gate", "head"]


class Router(nn.Module):
    """A block of experts: its router and its norms are small, and what decides the routing is sensitive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.layer_norm(x.float(), (WIDTH,), self.norm.weight.float(), self.norm.bias.float())
        shares = self.gate(hidden.to(self.gate.weight.dtype)).float().softmax(-1)
        each = torch.einsum("bi,eio->beo", hidden.to(self.experts.dtype), self.experts)
        mixed: Tensor = (each.float() * shares.unsqueeze(-1)).sum(1)
        return x + mixed.to(x.dtype)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Router() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 300)  # larger than a block: a group of its own

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = functional.layer_norm(x.float(), (WIDTH,), self.norm.weight.float(), self.norm.bias.float())
        logits = self.head(x.to(self.head.weight.dtype)).float()
        return functional.cross_entropy(logits, tokens)


def inputs(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randint(50, (6,), generator=generator)


def shares(count: int, world_size: int) -> Iterator[list[tuple[Tensor]]]:
    """For each micro-batch, that of every rank."""
    drawn = inputs(count * world_size)
    for _ in range(count):
        yield [(next(drawn),) for _ in range(world_size)]
