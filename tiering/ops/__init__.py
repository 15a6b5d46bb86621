"""``deepspeed.ops``: optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
__getattr__, __dir__ = _lazy.names(__name__, {}, submodules=__all__)
