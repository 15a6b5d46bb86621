"""``deepspeed.runtime.config``: a configuration, read and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.configuration import DeepSpeedConfig, DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.configuration": __all__})
