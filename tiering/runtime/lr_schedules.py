"""``deepspeed.runtime.lr_schedules``: learning rates by update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.values import (
        LR_RANGE_TEST,
        ONE_CYCLE,
        VALID_LR_SCHEDULES,
        WARMUP_COSINE_LR,
        WARMUP_DECAY_LR,
        WARMUP_LR,
    )
    from zero3.optimizer.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
]
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "zero3.deepspeed.values": (
            *("LR_RANGE_TEST", "ONE_CYCLE", "VALID_LR_SCHEDULES"),
            *("WARMUP_COSINE_LR", "WARMUP_DECAY_LR", "WARMUP_LR"),
        ),
        "zero3.optimizer.schedulers": (
            *("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
        ),
    },
)
