"""``deepspeed.runtime.dataloader``: loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.loop.data_loader import RepeatingLoader

__all__ = ["RepeatingLoader"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.loop.data_loader": __all__})
