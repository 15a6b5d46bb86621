"""What the tensors hold, on both sides: numbers that stay ordinary, and so cost the same, however often stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

STRIDE = 61  # of the elements that are looked at: prime, so that every place in a vector is among them

HYPER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""What every Adam here is given. The rate is small so that thousands of steps leave a parameter where it was."""


def parameters(numel: int) -> torch.Tensor:
    """As weights are: mean 0, deviation 0.02."""
    return torch.empty(numel).normal_(0.0, 0.02)


def gradients(numel: int) -> torch.Tensor:
    """Of both signs and none near 0, whose moments would fade into subnormals."""
    grad = torch.empty(numel).uniform_(0.5, 1.5)
    grad[::2].neg_()
    return grad


def odd(tensor: torch.Tensor) -> int:
    """How many of the elements looked at are infinite, NaN or subnormal."""
    sample = tensor.detach().reshape(-1)[::STRIDE]
    strange = ~sample.isfinite()
    if sample.dtype is not torch.float16:  # small weights are subnormal in fp16, and converted as fast
        strange |= (sample != 0) & (sample.abs() < torch.finfo(sample.dtype).tiny)
    return int(strange.sum())


def memory() -> dict[str, float]:
    """GB resident in this process, and how many of them in transparent huge pages."""
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {
        "resident": int(fields["Rss:"]) * 1024 / 1e9,
        "huge": int(fields.get("AnonHugePages:", 0)) * 1024 / 1e9,
    }
