"""Blocks of many experts with a frozen base: adapters train, and the data choose the experts of each block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.e2e.fuzz.bodies import Fused

WIDTH, EXPERTS, LAYERS = 64, 8, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.silu(self.up(x)))
        return hidden


class ExpertBlock(nn.Module):
    """A frozen linear layer with an adapter, then the experts of ``routes``, whose shares a router computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, routes: list[int]) -> Tensor:
        hidden = self.norm(x)
        x = x + self.mix(hidden) + functional.linear(functional.linear(hidden, self.a), self.b)
        shares = self.gate(x).softmax(-1)
        for expert in routes:
            x = x + shares[:, expert, None] * self.experts[expert](x)
        return x


class ExpertModel(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, routes: list[list[int]]) -> Tensor:
        x = self.first(x)
        for layer, chosen in zip(self.layers, routes, strict=True):
            x = checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpointed else layer(x, chosen)
        return x.float().pow(2).mean()


class FusedBlock(nn.Module):
    """As ``ExpertBlock``; each row goes to two experts, which are fused as in transformers."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.experts = Fused(EXPERTS, WIDTH, grouped=grouped)

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        x = x + self.mix(x) + functional.linear(functional.linear(x, self.a), self.b)
        outputs = self.experts(x.repeat_interleave(2, 0), routes.flatten()).view(*x.shape[:1], 2, WIDTH)
        return x + outputs.mean(1)


class FusedModel(nn.Module):
    def __init__(self, *, grouped: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(FusedBlock(grouped=grouped) for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, routes: Tensor) -> Tensor:
        x = self.first(x)
        for layer, chosen in zip(self.layers, routes, strict=True):
            x = checkpoint(layer, x, chosen, use_reentrant=False) if self.checkpointed else layer(x, chosen)
        return x.float().pow(2).mean()


def fused_model(*, grouped: bool, checkpointed: bool = False) -> FusedModel:
    """Only the adapters and the first layer train."""
    torch.manual_seed(11)
    model = FusedModel(grouped=grouped, checkpointed=checkpointed)
    for layer in model.layers:
        assert isinstance(layer, FusedBlock)
        layer.mix.requires_grad_(False)
    return model


def expert_model(*, checkpointed: bool = False) -> ExpertModel:
    """Only the adapters and the first layer train."""
    torch.manual_seed(11)
    model = ExpertModel(checkpointed=checkpointed).requires_grad_(False)
    model.first.requires_grad_(True)
    for layer in model.layers:
        assert isinstance(layer, ExpertBlock)
        layer.a.requires_grad_(True)
        layer.b.requires_grad_(True)
    return model


def drawn_routes(count: int, chosen: int = 2) -> list[list[list[int]]]:
    """For each of ``count`` passes and each layer, ``chosen`` experts."""
    generator = torch.Generator().manual_seed(3)
    return [
        [sorted(torch.randperm(EXPERTS, generator=generator)[:chosen].tolist()) for _ in range(LAYERS)]
        for _ in range(count)
    ]
