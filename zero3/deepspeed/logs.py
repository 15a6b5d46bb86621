"""What scripts say themselves, through a logger of ours: with the rank in front, and not once per rank."""

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
    """Log ``message`` on ``ranks`` only; on all of them without any, or with -1."""
    if not ranks or -1 in ranks or standing()[0] in ranks:
        logger.log(level, "%s", message)


def see_memory_usage(message: object, force: bool = False) -> None:
    """With ``force``, log what this process holds on the device and in host memory."""
    if not force:
        return
    device = chosen_device()
    if device.type == "cuda":
        held, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        logger.info("%s: device %.2f GiB, at most %.2f GiB so far", message, held / GIB, most / GIB)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # which counts in KiB
    logger.info("%s: host at most %.2f GiB so far", message, most / GIB)
