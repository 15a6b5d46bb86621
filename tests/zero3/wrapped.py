"""A model whose frozen weights are tensor subclasses around codes and scales, as those of torchao are."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

WIDTH = 72


class Coded(torch.Tensor):
    """int8 codes with an fp32 scale for each row. Every operation sees the product."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, *_: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], dtype)

    def decoded(self) -> Tensor:
        return (self.codes * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            self = args[0]
            return cls(func(self.codes), func(self.scale), self.dtype)
        plain = tree_map(
            lambda each: each.decoded() if isinstance(each, Coded) else each, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class Negated(torch.Tensor):
    """A wrapper around a wrapper: minus its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Negated:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].inner))
        plain = tree_map(
            lambda each: -each.inner if isinstance(each, Negated) else each, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


def coded(dtype: torch.dtype) -> Coded:
    codes = torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8)
    return Coded(codes, torch.rand(WIDTH, 1) / 1000, dtype)


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.weight = nn.Parameter(coded(dtype), requires_grad=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = nn.Parameter(Negated(coded(dtype)), requires_grad=False)
        self.adapter = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.adapter(x)))


class Model(nn.Module):
    """Blocks, one of them recomputed, and a head with a weight of the first; reads a weight of another module."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.blocks[0].up.weight
        self.again = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x)
        return self.head(x) + x @ self.blocks[1].up.weight


NAMES = [f"blocks.{number}.{name}" for number in range(3) for name in (
    "up.weight.codes", "up.weight.scale", "down.weight.inner.codes", "down.weight.inner.scale"
)] + ["head.weight.codes", "head.weight.scale", "again.codes", "again.scale"]  # fmt: skip
