"""``deepspeed.ops.lion``: Lion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.optimizers import DeepSpeedCPULion, FusedLion

# DeepSpeed has modules below this one: see _module_finder.py.
__path__: list[str] = []
__all__ = ["DeepSpeedCPULion", "FusedLion"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.optimizers": __all__})
