"""How fast this CPU computes in 16 bits: without instructions for a dtype, torch computes it element by element."""

from __future__ import annotations

import functools
import time

import torch

SLOW = 8.0
"""Times the seconds of fp32 from which a dtype is called slow: a CPU with instructions for it needs at most 2 times as
long, one without them tens of times."""
# Rows and columns of the measured product: 8 million operations take 10 ms on a slow CPU.
ROWS, WIDTH = 64, 256
PRODUCTS = 10
"""The shortest counts: the first ones are slower, because libraries and threads set themselves up."""


@functools.cache
def slowdown(dtype: torch.dtype) -> float:
    """The time of a matrix product in ``dtype`` on this CPU, divided by that in fp32. Measured once per process."""
    return _product_seconds(dtype) / _product_seconds(torch.float32)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU computes in ``dtype`` much slower than in fp32."""
    return slowdown(dtype) >= SLOW


def _product_seconds(dtype: torch.dtype) -> float:
    rows, weights = (torch.ones(size, WIDTH, dtype=dtype, device="cpu") for size in (ROWS, WIDTH))
    times = []
    with torch.no_grad():
        for _ in range(PRODUCTS):
            start = time.perf_counter()
            torch.mm(rows, weights)
            times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
