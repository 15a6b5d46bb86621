"""``deepspeed.ops.adam``: Adam and AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.ops.adam import cpu_adam, fused_adam
    from zero3.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam", "cpu_adam", "fused_adam"]
__getattr__, __dir__ = _lazy.names(
    __name__,
    {"zero3.deepspeed.optimizers": ("DeepSpeedCPUAdam", "FusedAdam")},
    submodules=("cpu_adam", "fused_adam"),
)
