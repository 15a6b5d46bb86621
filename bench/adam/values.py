"""What the tensors hold, on both sides: numbers that stay ordinary, and so cost the same, however often stepped."""

from __future__ import annotations

import mmap
import os
import weakref
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


class Pages:
    """Memory for arrays that two processes may share: both then step the very same pages, which matters.

    Equal arrays in two processes were measured to differ by a tenth in speed, for as long as the processes lived: it
    is luck which physical pages each gets. ``descriptor`` opens what another process made.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        self.nbytes = nbytes
        if descriptor is None:
            descriptor = os.memfd_create("bench_adam")
            os.ftruncate(descriptor, nbytes)
            weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)
        self._end = 0

    def room(self, numel: int, dtype: torch.dtype, slot: int | None) -> torch.Tensor:
        """Zeros that start ``slot`` times APART bytes into a page; None: at a page's start, as allocators have it."""
        assert slot is None or 0 <= slot < PAGE // APART
        start = -(-self._end // PAGE) * PAGE + (slot or 0) * APART
        self._end = start + numel * dtype.itemsize
        return self.at(start, numel, dtype)

    def at(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The array that begins at byte ``start``."""
        assert start + numel * dtype.itemsize <= self.nbytes
        return self._bytes[start : start + numel * dtype.itemsize].view(dtype)

    def copy(self, tensor: torch.Tensor, slot: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of ``tensor``, perhaps in another ``dtype``, in room of its own."""
        return self.room(tensor.numel(), dtype or tensor.dtype, slot).copy_(tensor)

    def start_of(self, tensor: torch.Tensor) -> int:
        """Where one of its arrays begins."""
        return tensor.data_ptr() - self._bytes.data_ptr()


def parameters(numel: int) -> torch.Tensor:
    """As weights are: mean 0, deviation 0.02."""
    return torch.empty(numel).normal_(0.0, 0.02)


def gradients(numel: int) -> torch.Tensor:
    """Of both signs and none near 0, whose moments would fade into subnormals."""
    grad = torch.empty(numel).uniform_(0.5, 1.5)
    grad[::2].neg_()
    return grad


class Slots:
    """Which slot an array has by its part in a step; none if everything is to lie where allocators put it."""

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
