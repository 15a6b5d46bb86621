"""``deepspeed.runtime.zero``: where DeepSpeed has the names of ``deepspeed.zero``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.runtime.zero import partition_parameters
    from zero3.deepspeed.tiled_linear import TiledLinear, TiledLinearReturnBias
    from zero3.deepspeed.zero import GatheredParameters, Init, register_external_parameter
    from zero3.params.resharded import ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "partition_parameters",
    "register_external_parameter",
]
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "zero3.deepspeed.zero": ("GatheredParameters", "Init", "register_external_parameter"),
        "zero3.deepspeed.tiled_linear": ("TiledLinear", "TiledLinearReturnBias"),
        "zero3.params.resharded": ("ZeroParamStatus",),
    },
    submodules=("partition_parameters", "tiling"),
)
