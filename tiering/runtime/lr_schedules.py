"""``deepspeed.runtime.lr_schedules``: learning rates by update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.optimizer.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.optimizer.schedulers": __all__})
