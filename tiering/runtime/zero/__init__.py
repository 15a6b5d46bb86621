"""``deepspeed.runtime.zero``: what of it scripts import that save weights themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.runtime.zero import partition_parameters

__all__ = ["partition_parameters"]
__getattr__, __dir__ = _lazy.names(__name__, {}, submodules=__all__)
