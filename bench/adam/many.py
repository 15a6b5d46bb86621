"""A model of many small tensors, through the class that users see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

import optim_cpu

from . import values
from .readings import ROOF, Row, timed
from .steps import STEP, forced

TORCH, OURS = "torch fused", "ours"

SMALLEST, LARGEST = 1, 100_000

ROOF_NUMEL = 128_000_000


def uniform(source: np.random.Generator, count: int, largest: int) -> NDArray[np.int64]:
    return source.integers(SMALLEST, largest, size=count, endpoint=True)


def log_uniform(source: np.random.Generator, count: int, largest: int) -> NDArray[np.int64]:
    """Every order of magnitude equally often."""
    logs = source.uniform(np.log(SMALLEST), np.log(largest), size=count)
    return np.exp(logs).round().astype(np.int64)


SIZES: dict[str, Callable[[np.random.Generator, int, int], NDArray[np.int64]]] = {
    "log-uniform": log_uniform,
    "uniform": uniform,
}


class Model:
    """``count`` fp32 parameters of 1 to ``largest`` elements, stepped by torch's AdamW and by ours in turn.

    Parameters and gradients are the same tensors; each optimizer has moments of its own. 24 bytes per parameter.
    """

    def __init__(self, distribution: str, count: int, largest: int = LARGEST) -> None:
        torch.manual_seed(0)
        sizes = SIZES[distribution](np.random.default_rng(0), count, largest).tolist()
        self.parameters = [torch.nn.Parameter(values.parameters(size)) for size in sizes]
        for parameter in self.parameters:
            parameter.grad = values.gradients(parameter.numel())
        self.numel = sum(sizes)
        self.torch_adam = torch.optim.AdamW(self.parameters, fused=True, **values.HYPER)
        self.our_adam = optim_cpu.AdamW(self.parameters, **values.HYPER)

    def odd(self) -> int:
        """How many odd values there are by now, among those looked at."""
        states = (
            state for optimizer in (self.torch_adam, self.our_adam) for state in optimizer.state.values()
        )
        tensors = [tensor for state in states for tensor in state.values() if torch.is_tensor(tensor)]
        return sum(map(values.odd, [*self.parameters, *tensors]))

    def rows(self, isa: str) -> list[Row]:
        flat = torch.ones(min(ROOF_NUMEL, self.numel))
        return [
            Row(ROOF, 8, flat.numel(), timed(lambda: flat.mul_(1.0))),
            Row(TORCH, STEP, self.numel, timed(self.torch_adam.step)),
            Row(OURS, STEP, self.numel, forced(isa, timed(self.our_adam.step)), isa),
        ]
