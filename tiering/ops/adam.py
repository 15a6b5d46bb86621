"""``deepspeed.ops.adam``: Adam and AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import lazy

if TYPE_CHECKING:
    from zero3.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
__getattr__, __dir__ = lazy.names(__name__, {"zero3.deepspeed.optimizers": __all__})
