"""``deepspeed.utils.logging``: where DeepSpeed has its logger."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.logs import log_dist, logger

__all__ = ["log_dist", "logger"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.logs": __all__})
