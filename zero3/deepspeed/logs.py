"""Logging for scripts, with the engine's logger: each line has its rank, and not all ranks log it."""

from __future__ import annotations

import logging
import resource
from collections.abc import Collection

import torch

from zero3.device.choice import chosen_device
from zero3.ranks.joining import standing

logger = logging.getLogger("tiering")

GIB = 1 << 30


def log_dist(message: object, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks`` only; on all ranks without ``ranks``, or with -1."""
    if not ranks or -1 in ranks or standing()[0] in ranks:
        logger.log(level, "%s", message)


def see_memory_usage(message: object, force: bool = False) -> None:
    """With ``force``, log the device memory and host memory of this process."""
    if not force:
        return
    device = chosen_device()
    if device.type == "cuda":
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        logger.info("%s: device %.2f GiB, peak %.2f GiB", message, allocated / GIB, peak / GIB)
    # ru_maxrss is in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    logger.info("%s: host peak %.2f GiB", message, peak / GIB)
