"""How fast this CPU computes in 16 bits: without instructions for a dtype, torch computes it element by element."""

from __future__ import annotations

import functools
import logging
import time

import torch

from tiering import _logs
from tiering.config.training import TieringConfig
from zero3.params.precision import COMPUTE_DTYPES

log = logging.getLogger(__name__)

SLOW = 8.0
"""Times the seconds of fp32 from which a dtype is called slow: a CPU with instructions for it needs at most 2 times as
long, one without them tens of times."""
# Rows and columns of the measured product: 8 million operations take 10 ms on a slow CPU.
ROWS, WIDTH = 64, 256


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
        # The first product is slower: libraries set themselves up.
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(rows, weights)
            times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def warn_if_slow(settings: TieringConfig, device: torch.device) -> None:
    """Warn if ``device`` is a CPU on which the configured precision, or that of autocast, is slow."""
    name = settings.autocast or settings.precision
    dtype = COMPUTE_DTYPES[name]
    if device.type != "cpu" or not is_slow(dtype):
        return
    section = "torch_autocast" if settings.autocast else name
    log.log(
        _logs.once(logging.WARNING),
        "this CPU has no instructions for %s: matrix products take %.0f times as long as in fp32; to train on this"
        ' CPU, set "%s": {"enabled": false} in the configuration',
        *(name, slowdown(dtype), section),
    )
