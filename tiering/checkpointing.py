"""``deepspeed.checkpointing``: recomputation of activations in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.checkpointing import (
        checkpoint,
        configure,
        is_configured,
        non_reentrant_checkpoint,
        reset,
    )

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.checkpointing": __all__})
