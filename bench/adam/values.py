"""What the tensors hold, on both sides: numbers that stay ordinary, and so cost the same, however often stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PAGE = 4096
APART = 512
"""Bytes by which arrays that are walked side by side start at different places within a page.

Allocators put every large array at the same place of a page, and how many pages lie between two is luck. At some
distances (on Zen 4, 2^20 + 2^15 bytes is one) two such arrays evict each other's lines from the first-level cache,
which tells lines of one set apart by a hash of their address: measured, a step in that cache takes up to 2.6 times as
long, and one over large arrays up to 1.5. Lines of different sets cannot collide.
"""

STRIDE = 61  # of the elements that are looked at: prime, so that every place in a vector is among them

HYPER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""What every Adam here is given. The rate is small so that thousands of steps leave a parameter where it was."""


def room(numel: int, dtype: torch.dtype, slot: int | None) -> torch.Tensor:
    """An uninitialised tensor that starts ``slot`` times APART bytes into a page; None: where torch puts it."""
    if slot is None:
        return torch.empty(numel, dtype=dtype)
    assert 0 <= slot < PAGE // APART
    nbytes = numel * dtype.itemsize
    raw = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE + slot * APART
    return raw[start : start + nbytes].view(dtype)


def parameters(numel: int, slot: int | None = None) -> torch.Tensor:
    """As weights are: mean 0, deviation 0.02."""
    return room(numel, torch.float32, slot).normal_(0.0, 0.02)


def gradients(numel: int, slot: int | None = None) -> torch.Tensor:
    """Of both signs and none near 0, whose moments would fade into subnormals."""
    grad = room(numel, torch.float32, slot).uniform_(0.5, 1.5)
    grad[::2].neg_()
    return grad


def moved(tensor: torch.Tensor, slot: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy, perhaps in another ``dtype``, that starts as ``room`` has it."""
    return room(tensor.numel(), dtype or tensor.dtype, slot).copy_(tensor)


class Slots:
    """Which slot an array has by its part in a step; none if everything is to lie where torch puts it."""

    def __init__(self, apart: bool) -> None:
        roles = range(6) if apart else [None] * 6
        self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.out, self.remainder = roles


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
