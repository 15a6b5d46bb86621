"""``deepspeed.runtime.engine``: the engine's class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.engine": __all__})
