"""``deepspeed.ops.adagrad``: Adagrad."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.optimizers import DeepSpeedCPUAdagrad

# DeepSpeed has modules below this one: see _module_finder.py.
__path__: list[str] = []
__all__ = ["DeepSpeedCPUAdagrad"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.optimizers": __all__})
