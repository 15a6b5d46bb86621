"""``deepspeed.accelerator``: the device that this process computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.accelerator import get_accelerator

# DeepSpeed has modules below this one: see _module_finder.py.
__path__: list[str] = []
__all__ = ["get_accelerator"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.accelerator": __all__})
