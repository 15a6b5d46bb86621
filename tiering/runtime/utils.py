"""``deepspeed.runtime.utils``: the names that training scripts import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.logs import see_memory_usage
    from zero3.deepspeed.tensors import move_to_device

__all__ = ["move_to_device", "see_memory_usage"]
__getattr__, __dir__ = _lazy.names(
    __name__,
    {"zero3.deepspeed.logs": ("see_memory_usage",), "zero3.deepspeed.tensors": ("move_to_device",)},
)
