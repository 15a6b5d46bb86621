"""The strategy of Lightning's Fabric, without its base class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tiering
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from tiering.integrations import _engines
from tiering.integrations._lightning import (
    TAG,
    StrategyOfEngines,
    check_precision,
    completed,
    is_checkpoint,
    save,
)
from tiering.integrations._remedies import FABRIC, named_by

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from tiering import DeepSpeedEngine

_Precision: Any = object
"""The base of the mixin, as that of a strategy in _lightning.py."""


class EngineFabricPrecision(_Precision):  # type: ignore[misc] # Any
    """The precision of an engine, which casts inputs and scales the loss itself."""

    def __init__(self, precision: str) -> None:
        check_precision(precision)
        super().__init__()
        self.precision: Any = precision


class _NoSync:
    """Fabric's way to ask for backwards that only accumulate."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        return module.no_sync() if enabled else nullcontext()


class EngineFabricStrategy(StrategyOfEngines):
    """Trains modules of Fabric on tiered engines, on one or several ranks, on CPUs or GPUs.

    The arguments are those of TieringStrategy. ``fabric.setup(model, optimizer)`` starts an engine; it takes one
    optimizer for a model, and both together. ``fabric.save`` and ``fabric.load`` write and read a directory with a
    checkpoint of the engine of the one model in ``state``, and the other values of ``state``.

    Raises ConfigError for a configuration, a precision or optimizers that an engine cannot honour.
    """

    precision_type: type[Any]
    """The class of precisions for this namespace of Lightning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _NoSync()
        self._by_front: dict[nn.Module, DeepSpeedEngine] = {}

    def engine(self, module: nn.Module | None = None) -> DeepSpeedEngine:
        """The engine of ``module``, which ``fabric.setup`` has returned; None is the only one.

        Raises EngineStateError if there is no such engine.
        """
        if module is None and len(self._by_front) == 1:
            return next(iter(self._by_front.values()))
        for front, engine in self._by_front.items():
            if (
                module is front
                or module is engine.module
                or getattr(module, "_forward_module", None) is front
            ):
                return engine
        raise EngineStateError(
            f"{'no engine for this module' if module is not None else f'{len(self._by_front)} engines'}: pass a module"
            " that fabric.setup(model, optimizer) has returned, for example fabric.backward(loss, model=model)"
        )

    def release(self, module: nn.Module | None = None, device: torch.device | str | None = None) -> nn.Module:
        """End the engine of ``module`` (None: the only one), and return the model with ordinary parameters.

        See ``Engine.release`` for ``device`` and errors.
        """
        engine = self.engine(module)
        _engines.release(engine.module, device)
        self._by_front = {front: other for front, other in self._by_front.items() if other is not engine}
        return engine.module

    @property
    def precision(self) -> Any:
        """The precision of the engines, by the name that Fabric was given."""
        return super().precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        if precision is not None and not isinstance(precision, EngineFabricPrecision):
            precision = self.precision_type(str(precision.precision))
        self._precision = precision

    # Setup

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine places the parameters."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Build modules without memory for their parameters, in stage 3."""
        stack = ExitStack()
        stack.enter_context(
            tiering.zero.Init(config_dict_or_path=self._completed(), enabled=self._builds_without_memory)
        )
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """The same as ``module_init_context``."""
        return self.module_init_context()

    def _completed(self) -> dict[str, Any]:
        return completed(self.config, str(self.precision.precision))

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Any], Any]:
        """Start the engine of ``module`` with the one optimizer of ``optimizers``."""
        if len(optimizers) != 1:
            raise ConfigError(
                f"fabric.setup got {len(optimizers)} optimizers for a model; an engine has one: pass one optimizer with"
                " a param group for each part of the model"
            )
        config = {key: value for key, value in self._completed().items() if key != "scheduler"}
        front = self._start(module, config, optimizers[0])
        return front, [self._by_front[front].as_optimizer()], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Start an engine of ``module`` that does not train."""
        config = {
            key: value for key, value in self._completed().items() if key not in ("optimizer", "scheduler")
        }
        return self._start(module, config)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise ConfigError: the engine starts with its optimizer."""
        raise ConfigError(
            "an optimizer cannot be set up alone, because its state is placed with the model; call"
            " fabric.setup(model, optimizer)"
        )

    def _start(self, module: nn.Module, config: dict[str, Any], optimizer: Any = None) -> nn.Module:
        engine = _engines.start(
            module, config, processes=self.world_size, optimizer=optimizer, weights=self._weights
        )
        front = engine.as_module()
        self._by_front[front] = engine
        return front

    # Training

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward of ``tensor`` times the loss scale of the engine of ``module``."""
        self.engine(module).scale(tensor).backward(*args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of the next step; returns their norm before clipping, a scalar tensor of fp32.

        Raises ConfigError for another ``norm_type`` than 2, and EngineStateError for a norm that is not finite.
        """
        if norm_type != 2.0:
            raise ConfigError(f"unsupported norm_type={norm_type!r}; an engine clips by the 2-norm")
        norm = optimizer.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not torch.isfinite(torch.tensor(norm)):
            raise EngineStateError(
                f"the norm of the gradients is {norm}; pass error_if_nonfinite=False to let the step be skipped"
            )
        return torch.tensor(norm)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Raise ConfigError: gradients are on tiers."""
        raise ConfigError("clip_val is not supported, because gradients are on tiers; use max_norm")

    # Checkpoints

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save the engine of the model in ``state``, and the other values of ``state``, in the directory ``path``.

        Raises ConfigError unless ``state`` has one model of ``fabric.setup``.
        """
        if storage_options is not None or filter is not None:
            raise ConfigError(
                "storage_options and filter are not supported, because the engine writes the checkpoint"
            )
        engine, rest = self._split(state)
        with named_by(FABRIC):
            save(engine, self.broadcast(path), self._convert_stateful_objects_in_state(rest, filter={}))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint in the directory ``path`` into the objects of ``state``; returns the other values.

        A file is loaded as in other strategies. Raises CheckpointError, with ``strict``, if the checkpoint lacks a key
        of ``state``; ConfigError unless ``state`` has one model of ``fabric.setup``.
        """
        path = self.broadcast(path)
        if not is_checkpoint(path):
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        if isinstance(state, nn.Module):
            with named_by(FABRIC):
                self.engine(state).load_checkpoint(path, tag=TAG, load_module_only=True)
            return {}
        engine, rest = self._split(state or {})
        with named_by(FABRIC):
            _, values = engine.load_checkpoint(path, tag=TAG, load_module_strict=strict)
        if strict and (missing := sorted(set(rest) - set(values))):
            raise CheckpointError(
                f"the checkpoint {path} has no {', '.join(map(repr, missing))}; remove it from state, or pass"
                " strict=False"
            )
        for key in rest.keys() & values.keys():
            value = values.pop(key)
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(value)
            else:
                state[key] = value
        return values

    def _split(self, state: dict[str, Any]) -> tuple[DeepSpeedEngine, dict[str, Any]]:
        """The engine of the one model of ``state``, and the values that belong to no engine."""
        engines = [self._by_front[value] for value in state.values() if self._is_front(value)]
        if len(engines) != 1:
            raise ConfigError(
                f"the state of a checkpoint has {len(engines)} models of fabric.setup, and needs one; save other models"
                " in directories of their own"
            )
        optimizer = engines[0].as_optimizer() if engines[0].optimizer.trains else None
        return engines[0], {
            key: value
            for key, value in state.items()
            if not self._is_front(value) and (optimizer is None or value is not optimizer)
        }

    def _is_front(self, value: Any) -> bool:
        return isinstance(value, nn.Module) and value in self._by_front
