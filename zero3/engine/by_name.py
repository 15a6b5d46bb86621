"""Parameters, gradients and optimizer state, read and set by the name of their parameter.

The name may be that of a weight which is stored as tiles (row_tiles.py): its values are then joined and split.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError
from tiering.placement.row_tiles import joined_shape
from zero3.engine.accumulated_gradients import AccumulatedGradients, check_trained, flat_fp32
from zero3.loop.lifecycle import Readiness
from zero3.params import resharded
from zero3.params.layout import Piece
from zero3.params.param_group import ParamGroup
from zero3.state.access import Access
from zero3.state.tensors import TieredState

_open: weakref.WeakKeyDictionary[Access, weakref.ref[NamedState]] = weakref.WeakKeyDictionary()


def named_state_of(param: nn.Parameter) -> tuple[NamedState, str]:
    """The named state of the engine that ``param`` belongs to, and its name there.

    ConfigError if ``param`` belongs to no open engine.
    """
    owner = resharded.owner_of(param)
    reference = _open.get(owner) if isinstance(owner, Access) else None
    named_state = None if reference is None else reference()
    if not isinstance(owner, Access) or named_state is None:
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine; initialize its model, and ask for the"
            " parameters of engine.module"
        )
    return named_state, owner.parameters.name_of(param)


class NamedState:
    """Reads and sets the master, state and gradient of each parameter. ``Engine`` documents the methods."""

    def __init__(
        self,
        access: Access,
        state: TieredState,
        gradients: AccumulatedGradients,
        ready: Readiness,
    ) -> None:
        self._access = access
        self._parameters = access.parameters
        self._state = state
        self._gradients = gradients
        self._ready = ready
        _open[access] = weakref.ref(self)

    def get_fp32_parameter(self, name: str) -> Tensor:
        """A copy of the fp32 master; of a frozen parameter its value, in its dtype if it keeps that."""
        self._ready.check_open("get_fp32_parameter")
        masters: list[Tensor] = []
        for group, piece in self._parameters.parts(name):
            self._parameters.store_edits_of_residents(group)
            masters.append(self._state.master(group, piece))
        return _joined(masters)

    def set_fp32_parameter(self, name: str, values: Tensor) -> None:
        """Make ``values`` the master, and their rounded values the parameter."""
        self._ready.check_open("set_fp32_parameter")
        for group, piece, part in self._split(name, values):
            if piece.own_dtype is not None:
                raise ConfigError(
                    f"{name!r} is {piece.own_dtype} and frozen, and has no fp32 value to set: change it inside"
                    " tiering.gathered(param, modify=True)"
                )
            self._access.before_write(group, piece)
            self._state.set_master(group, piece, self._state.values_of_rank(0, piece, part))

    def get_fp32_gradient(self, name: str) -> Tensor | None:
        """A copy of the accumulated gradient, unscaled; None if there is none. Zeros for tiles without one."""
        self._gradients.check_readable("get_fp32_gradient")
        parts = self._parameters.parts(name)
        gradients = [self._gradients.get(group, piece) for group, piece in parts]
        if all(gradient is None for gradient in gradients):
            return None
        return _joined(
            [
                torch.zeros(piece.shape, device="cpu") if gradient is None else gradient
                for gradient, (_, piece) in zip(gradients, parts, strict=True)
            ]
        )

    def set_fp32_gradient(self, name: str, values: Tensor) -> None:
        """Replace the accumulated gradient by ``values``, unscaled."""
        for group, piece, part in self._split(name, values):
            self._gradients.check_replaceable("set_fp32_gradient", piece)
            self._gradients.replace(group, piece, self._state.values_of_rank(0, piece, part))

    def get_fp32_state(self, name: str, key: str) -> Tensor:
        """A copy of the state tensor ``key``."""
        self._ready.check_open("get_fp32_state")
        states: list[Tensor] = []
        for group, piece in self._parameters.parts(name):
            check_trained(piece)
            states.append(self._state.moment(group, piece, key))
        return _joined(states)

    def set_fp32_state(self, name: str, key: str, values: Tensor) -> None:
        """Replace the state tensor ``key``."""
        self._ready.check_open("set_fp32_state")
        for _, piece, part in self._split(name, values):
            check_trained(piece)
            self._state.set_moment(piece, key, self._state.values_of_rank(0, piece, part))

    def is_trained(self, name: str) -> bool:
        """Whether the parameter is trained, not frozen."""
        return all(piece.trainable for _, piece in self._parameters.parts(name))

    def _split(self, name: str, values: Tensor) -> Iterator[tuple[ParamGroup, Piece, Tensor]]:
        """The parts of the parameter ``name``, each with its flat fp32 ``values``; ConfigError for another shape."""
        parts = self._parameters.parts(name)
        flat = flat_fp32(values, name, joined_shape([piece.shape for _, piece in parts]))
        numels = [math.prod(piece.shape) for _, piece in parts]
        for (group, piece), part in zip(parts, flat.split(numels), strict=True):
            yield group, piece, part


def _joined(tiles: list[Tensor]) -> Tensor:
    return torch.cat(tiles) if len(tiles) > 1 else tiles[0]
