"""``deepspeed.runtime.zero.tiling``: linear layers that are cut into modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.tiled_linear import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
__getattr__, __dir__ = _lazy.names(
    __name__, {"zero3.deepspeed.tiled_linear": ("TiledLinear", "TiledLinearReturnBias")}
)
