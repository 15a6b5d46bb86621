"""What the tests of the optimizer classes share: pairs of equal parameters, and gradients for both."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import optim_cpu

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (33, 5), (2, 3, 4), (5000,))

CLASSES: dict[str, list[dict[str, Any]]] = {
    "Adam": [{}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.3, 0.6), "eps": 1e-3}],
    "AdamW": [{}, {"weight_decay": 0.1, "lr": 0.05}, {"maximize": True, "betas": (0.0, 0.9)}],
    "Adagrad": [
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1},
        {"initial_accumulator_value": 0.5, "maximize": True},
    ],
    "SGD": [
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
}
EVERY_OPTION = [(name, options) for name, every in CLASSES.items() for options in every]
ids = [f"{name}-{'-'.join(map(str, options)) or 'defaults'}" for name, options in EVERY_OPTION]


def ours(name: str, params: Any, **options: Any) -> Any:
    return getattr(optim_cpu, name)(params, **options)


def torchs(name: str, params: Any, **options: Any) -> Any:
    return getattr(torch.optim, name)(params, foreach=False, **options)


def parameters(
    shapes: Iterable[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def twins(params: Sequence[Parameter]) -> list[Parameter]:
    return [copy.deepcopy(param) for param in params]


def give_gradients(*sides: Sequence[Parameter], seed: int, missing: Iterable[int] = ()) -> None:
    """The same random gradients to the parameters of every side, of each one's dtype; none to those ``missing``."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, params in enumerate(zip(*sides, strict=True)):
        grad = torch.randn(params[0].shape, generator=generator)
        for param in params:
            param.grad = None if i in missing else grad.to(param.dtype)


def assert_near(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Equal but for rounding: both sides round a few times per step."""
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=3e-6, atol=3e-7)


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs"
