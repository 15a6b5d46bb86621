"""ModuleFront: an engine as an ``nn.Module``, for a trainer that calls and inspects a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, Self

from torch import nn

from tiering.errors import EngineStateError
from zero3.engine.generation import on_all_ranks

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""The attributes of a module that hold its parameters, buffers and children."""


class Called(Protocol):
    """The part of an engine that a front calls."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


class ModuleFront(nn.Module):
    """Calls an engine, and shows the model's own parameters, buffers and children under the model's own names.

    All other attributes are the model's (``config``, ``generate``, ...). ``module`` is the model. ``sharded`` tells
    that all ranks must run each forward together.
    """

    _engine: Called

    def __init__(self, engine: Called, *, sharded: bool) -> None:
        super().__init__()
        # Not as a child: in a program that imports deepspeed, torch takes an engine for a module.
        self.__dict__["_engine"] = engine
        self._sharded = sharded
        # The same containers: a module that is replaced here is replaced in the model, and the reverse.
        self.__dict__.update({name: engine.module.__dict__[name] for name in _SHARED})

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self._engine.module

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._engine.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        # nn.Module.__init__ sets it before there is an engine; the model keeps its mode.
        if "_engine" in self.__dict__:
            self._engine.module.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """``Engine.forward``."""
        return self._engine(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Put the model into training (or evaluation) mode."""
        self._engine.module.train(mode)
        return self

    def no_sync(self) -> AbstractContextManager[None]:
        """``Engine.no_sync``: backwards inside the block only accumulate."""
        return self._engine.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step; no effect after the engine is closed."""
        self._engine.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """``state_dict`` of the model. All ranks call it together.

        Values of parameters that are not on the device are copies, in host memory and in the compute dtype. Raises
        PlacementError, on all ranks and with sizes, if a rank has no room for them.
        """
        return self._engine.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """``load_state_dict`` of the model, on the tiers. All ranks call it together, with the same values.

        Values are rounded to the compute dtype, and masters follow. They are copied also with ``assign``: parameters of
        an engine keep their memory. Raises EngineStateError, which torch turns into RuntimeError, inside ``gathered``.
        """
        return self._engine.module.load_state_dict(state_dict, strict)

    # Not for mypy, which would allow any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                engine = self.__dict__.get("_engine")
                if engine is None or name.startswith("__"):
                    raise
            attribute = getattr(engine.module, name)
            if name == "generate" and self._sharded:
                return on_all_ranks(attribute, engine.module)
            return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, unless the front has it, or the name is private."""
        if name.startswith("_") or hasattr(type(self), name) or isinstance(value, nn.Module | nn.Parameter):
            super().__setattr__(name, value)
        else:
            setattr(self._engine.module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model: an ordinary module without an engine."""
        return copy.deepcopy(self._engine.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise EngineStateError(
            "the module of an engine cannot be pickled; pickle its `module`, which is pickled with its values, or save"
            " its state_dict()"
        )
