"""Models that do not divide evenly, leave parameters out, or go their own way on each rank; and their data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .training import Batch

WIDTH = 24


def vectors(count: int, world_size: int) -> Iterator[list[Batch]]:
    """Four rows for each rank."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield [(torch.randn(4, WIDTH, generator=generator),) for _ in range(world_size)]


def uneven_rows(count: int, world_size: int) -> Iterator[list[Batch]]:
    """One row more on each rank than on the one before."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(count):
        yield [(torch.randn(1 + rank, WIDTH, generator=generator),) for rank in range(world_size)]


def loss_of(x: Tensor) -> Tensor:
    return x.float().pow(2).mean()


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Blocks(nn.Module):
    """Blocks of sizes that no number of ranks divides. ``only``: leave the others out."""

    SIZES = (7, 1, 13, 29)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for size in self.SIZES)
        self.scale = nn.Parameter(torch.ones(()))  # no dimension: one element for all ranks

    def forward(self, x: Tensor, only: tuple[int, ...] | None = None) -> Tensor:
        x = x.to(self.scale.dtype) * self.scale
        for number, block in enumerate(self.blocks):
            if only is None or number in only:
                x = block(x)
        return loss_of(x)


class Tiny(nn.Module):
    """Three elements in all: less than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(2, 1))])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weights
        return loss_of(x.to(first.dtype)[:, :2] * first + second.sum())


class PartlyFrozen(Blocks):
    """A frozen block, frozen parts of others, a frozen group around them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, WIDTH) / 8, requires_grad=False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)
        self.blocks[3].down.bias.requires_grad_(False)

    def forward(self, x: Tensor, only: tuple[int, ...] | None = None) -> Tensor:
        return super().forward(x.to(self.table.dtype) + self.table[3], only)


class Tied(nn.Module):
    """One matrix into the blocks and out of them, and one more that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return loss_of(self.out(x))


class Sequences(nn.Module):
    """As many passes through the same blocks as a batch has elements in its sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(20) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(x)


def uneven_sequences(count: int, world_size: int) -> Iterator[list[Batch]]:
    generator = torch.Generator().manual_seed(8)
    for number in range(count):
        lengths = [1 + (3 * rank + number) % 5 for rank in range(world_size)]
        yield [(torch.randint(50, (2, length), generator=generator),) for length in lengths]


class Experts(nn.Module):
    """A router and its experts; the data say who is asked, so that a test knows."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block(size) for _ in range(4))

    def forward(self, x: Tensor, experts: tuple[int, ...]) -> Tensor:
        shares = self.router(x).softmax(-1)
        result: Tensor = x + sum(shares[:, expert, None] * self.experts[expert](x) for expert in experts)
        return result


class Mixture(nn.Module):
    """Blocks with experts inside: their parameters are their block's, and are there whoever is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: Tensor, experts: tuple[int, ...]) -> Tensor:
        x = x.to(self.blocks[0].router.weight.dtype)
        for block in self.blocks:
            x = block(x, experts)
        return loss_of(x)


class OuterExperts(nn.Module):
    """The outermost list of the model is its experts: each is a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts()

    def forward(self, x: Tensor, experts: tuple[int, ...]) -> Tensor:
        return loss_of(self.mixture(x.to(self.mixture.router.weight.dtype), experts))


class Choices:
    """Data that tell each rank what to use: rank r in micro-batch i ``turns[(r + i) % len(turns)]``, or, if that is the
    ``same`` for all ranks, ``turns[i % len(turns)]``."""

    def __init__(self, *turns: tuple[int, ...], same: bool = False) -> None:
        self.turns, self.same = turns, same

    def __call__(self, count: int, world_size: int) -> Iterator[list[Batch]]:
        for number, shares in enumerate(vectors(count, world_size)):
            places = [number if self.same else number + rank for rank in range(world_size)]
            yield [(x, self.turns[i % len(self.turns)]) for i, (x,) in zip(places, shares, strict=True)]


class Apart:
    """Three micro-batches for which all ranks use everything, then some for which rank r uses ``calls[r]``."""

    def __init__(self, calls: list[tuple[int, ...]]) -> None:
        self.calls = calls

    def __call__(self, count: int, world_size: int) -> Iterator[list[Batch]]:
        for number, shares in enumerate(vectors(count, world_size)):
            yield [(x, self.calls[rank] if number > 2 else (0, 1, 2, 3)) for rank, (x,) in enumerate(shares)]


class Unused(nn.Module):
    """A parameter that nobody uses, beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.never = nn.Parameter(torch.randn(30, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(x.to(self.never.dtype))
        for block in self.blocks:
            x = block(x)
        return loss_of(x)


class Spoilt(Blocks):
    """``spoil`` makes the gradient of one weight NaN, and nothing else; a NaN in the loss would be in all of them."""

    NAME = "blocks.2.down.weight"

    def forward(self, x: Tensor, spoil: bool = False) -> Tensor:
        self.blocks[2].down.spoil = spoil
        return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].down = SpoiltLinear(self.SIZES[2], WIDTH)


class SpoiltLinear(nn.Linear):
    spoil = False

    def forward(self, x: Tensor) -> Tensor:
        weight = _NanGradient.apply(self.weight) if self.spoil else self.weight
        return functional.linear(x, weight, self.bias)


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan
