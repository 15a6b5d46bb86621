"""``deepspeed.runtime``: the names that training scripts import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.runtime import config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
__getattr__, __dir__ = _lazy.names(__name__, {}, submodules=__all__)
