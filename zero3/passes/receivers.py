"""The interfaces by which a pass schedule hands on gradients and the events of a backward."""

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


class PassListener(Protocol):
    """Receives the events of a backward that concern the update of the parameters, in this order."""

    def on_backward(self) -> None:
        """A backward has begun. It may bring no gradients to parameters (torch.autograd.grad)."""

    def on_first_gradient(self) -> bool:
        """A parameter gets the first gradient. Returns whether this backward updates each group once it is final."""

    def on_gradient(self) -> None:
        """A gradient has arrived: a moment to go on with other work, of which a backward has many."""

    def on_group_done(self, group: ParamGroup, final: bool) -> None:
        """Backward has left ``group``. ``final``: its gradients are final, and the group is updated now."""

    def on_end_of_backward(self) -> None:
        """Backward has ended, and brought a gradient on at least one rank."""
