"""The interface by which a pass schedule hands gradients on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import nn

from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup


class GradientSink(Protocol):
    """Accepts gradients as they arrive: a GradientStore, or with several ranks a GradientReducer in front of it."""

    @property
    def received_elsewhere(self) -> bool:
        """Whether any rank, this one included, got a gradient in the last backward."""

    @property
    def takes_parts(self) -> bool:
        """Whether ``accumulate`` may be called for each part of a gradient: see gradient_parts.py."""

    def begin(self, used: Iterable[ParamGroup]) -> None:
        """A backward begins. Its forwards used the groups ``used``, in this order."""

    def accumulate(self, group: ParamGroup, piece: Piece, param: nn.Parameter) -> None:
        """Add ``param.grad`` to the gradient of ``piece`` and clear it on ``param``."""

    def final(self, group: ParamGroup) -> None:
        """No further gradient of ``group`` can arrive in this backward."""

    def close(self, group: ParamGroup, *, last: bool) -> None:
        """Backward has left ``group``. ``last``: it went through all forwards of the group and does not return."""

    def close_all(self) -> None:
        """Backward has ended."""

    def reset(self) -> None:
        """Drop all gradients."""
