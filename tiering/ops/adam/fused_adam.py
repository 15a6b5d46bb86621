"""``deepspeed.ops.adam.fused_adam``: where DeepSpeed has its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.optimizers import FusedAdam

__all__ = ["FusedAdam"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.optimizers": __all__})
