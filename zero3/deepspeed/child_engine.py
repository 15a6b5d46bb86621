"""An engine that a module can have as its child, in programs that import deepspeed.

DeepSpeed's engine is an ``nn.Module``. Programs put it into an attribute of their own module, in place of the model,
where torch accepts modules only. The engine is no subclass: the methods of ``nn.Module`` would hide those of the user's
module, to which it passes calls. For ``isinstance`` it is one, which is what torch asks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zero3.engine.engine import Engine


class ChildEngine(Engine):
    """An engine that can become the child of a module."""

    _seen_as: type | None = None

    def become_child(self) -> None:
        """Be an ``nn.Module`` for ``isinstance``, and let ``state_dict()`` of the module wait for no rank.

        At stage 3 with several ranks, DeepSpeed has empty tensors there, and programs for it use the names. Here it has
        the parameters themselves, with names, shapes and dtypes; a use of their values outside of passes raises
        ResidencyError. Parameters that do not leave the device keep their values. ``Engine.state_dict`` has values.
        """
        # No object has this class.
        self._seen_as = type(type(self).__name__, (type(self), nn.Module), {})
        self._access.saves_copies = self._world.partition_size == 1 or not self._access.partitioned

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """``Engine.state_dict``; with arguments, as the parent of a child passes them, that of the module."""
        if args or kwargs:
            state: dict[str, Tensor] = self.module.state_dict(*args, **kwargs)
            return state
        return Engine.state_dict(self)

    @property  # type: ignore[misc] # torch and programs ask isinstance
    def __class__(self) -> Any:
        return self._seen_as or type(self)
