"""The engines of a Trainer: of its model, and of the reference and reward models of a trainer of TRL.

They answer for the methods of the Trainer's Accelerator that would wrap a model, scale a loss or unwrap a model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import tiering
from tiering.config import ds_config
from tiering.config.ds_config.auto import hidden_size_of
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.integrations import _engines, _ranks, _training_arguments
from tiering.integrations._remedies import TRAINER, named_by
from tiering.integrations._traffic import Traffic
from tiering.integrations._training_arguments import Config

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine


class _Accelerate(NamedTuple):
    """The methods of an Accelerator that TrainerEngines replaces."""

    prepare_model: Callable[..., nn.Module]
    unwrap_model: Callable[..., nn.Module]
    backward: Callable[..., None]
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]


class TrainerEngines:
    """The engine of the model of ``trainer``, started when it is needed, and those of reference models.

    ``config`` is the configuration; if it is None, the attribute ``tiering_config`` of the TrainingArguments is used.
    ``weights`` is that of ``initialize``. ``reference_config`` is the configuration of each reference model; with None,
    they stay as they are.
    """

    def __init__(
        self,
        trainer: Any,
        config: Config | None,
        *,
        weights: str | Path | None,
        reference_config: Config | None,
    ) -> None:
        self._trainer = trainer
        self._given = config
        self.config: dict[str, Any] = {}
        self._weights = weights
        self._reference_config = reference_config
        self.engine: DeepSpeedEngine | None = None
        self.traffic: Traffic | None = None
        self._references: list[DeepSpeedEngine] = []

    def configure(self) -> None:
        """Read the configuration, and complete it. Raises ConfigError if there is none, or if it cannot be read."""
        given = getattr(self._trainer.args, "tiering_config", None) if self._given is None else self._given
        if given is None:
            raise ConfigError(
                f"{type(self._trainer).__name__} needs a configuration: pass tiering_config=, a path or a dict, or set"
                " the attribute tiering_config of the TrainingArguments"
            )
        self.config = _training_arguments.completed(given)

    def start(self, training: bool) -> DeepSpeedEngine:
        """Start the engine of the model, unless it runs. If the Trainer has data to train with, the engine trains."""
        trainer, model = self._trainer, self._trainer.model
        if self.engine is not None:
            if self.engine.module is model:
                return self.engine
            # model_init has made another model.
            self.engine.close()
            self._forget()
        # Another trainer may have it.
        _engines.release(model)
        training = training or trainer.train_dataset is not None
        optimizer = trainer.create_optimizer() if training else None
        self.engine = engine = self._initialize(
            model, self.config, training=training, optimizer=optimizer, weights=self._weights
        )
        self.traffic = Traffic(engine.snapshot)
        if training:
            trainer.optimizer = engine.as_optimizer()
            # Otherwise Accelerate would wrap it, to scale the loss.
            trainer.optimizer._is_accelerate_prepared = True
        _engines.set_synced(engine)
        return engine

    def settings(self, max_steps: int) -> TieringConfig:
        """The settings of a run of ``max_steps`` updates. Raises ConfigError that lists every problem."""
        context = ds_config.LoadContext(
            hidden_size=hidden_size_of(getattr(self._trainer.model, "config", None)),
            arguments=_training_arguments.known(self._trainer.args, self._trainer.model, max_steps),
        )
        with named_by(TRAINER):
            return ds_config.load(self.config, world_size=self._trainer.args.world_size, context=context)[0]

    def release(self, device: torch.device | str | None) -> None:
        """Turn the parameters of the model into ordinary ones, and end its engine."""
        if self.engine is not None:
            _engines.release(self.engine.module, device)
            self._forget()

    def close(self) -> None:
        """Close all engines."""
        for engine in self._running():
            engine.close()

    def _running(self) -> list[DeepSpeedEngine]:
        return [*([] if self.engine is None else [self.engine]), *self._references]

    def _forget(self) -> None:
        self.engine = self.traffic = None
        self._trainer.optimizer = self._trainer.lr_scheduler = None
        self._trainer.model_wrapped = self._trainer.model

    def _initialize(
        self, model: nn.Module, config: Config, *, training: bool = False, **options: Any
    ) -> DeepSpeedEngine:
        # The Trainer steps the schedule. Without an optimizer, an engine does not train.
        unused = {"scheduler"} if training else {"optimizer", "scheduler"}
        sections = _training_arguments.completed(config).items()
        args = self._trainer.args
        with named_by(TRAINER), _ranks.counted(args.world_size), _engines.computing_on(args.device):
            return tiering.initialize(
                args=_training_arguments.known(args, model, self._trainer.state.max_steps),
                model=model,
                config={key: value for key, value in sections if key not in unused},
                **options,
            ).engine

    # Methods of the Accelerator

    def serve(self, accelerator: Any) -> None:
        """Answer for ``accelerator`` from now on, where a model of an engine is concerned."""
        # The engine scales the loss.
        accelerator.scaler = None
        self._accelerate = _Accelerate(*(getattr(accelerator, name) for name in _Accelerate._fields))
        for name in _Accelerate._fields:
            setattr(accelerator, name, getattr(self, f"_{name}"))

    def _prepare_model(
        self, model: nn.Module, *args: Any, evaluation_mode: bool = False, **kwargs: Any
    ) -> nn.Module:
        if self._reference_config is None or not evaluation_mode:
            return self._accelerate.prepare_model(model, *args, evaluation_mode=evaluation_mode, **kwargs)
        engine = self._initialize(model, self._reference_config)
        _engines.set_synced(engine)
        self._references.append(engine)
        return engine.as_module().eval()

    def _unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for engine in self._running():
            if model is engine.as_module():
                model = engine.module
        return self._accelerate.unwrap_model(model, *args, **kwargs)

    def _backward(self, loss: Tensor, **kwargs: Any) -> None:
        backward = self._accelerate.backward if self.engine is None else self.engine.backward
        backward(loss, **kwargs)

    def _no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # Accelerate's has no effect in a single process; the engine uses it there, too.
        if self.engine is not None and model is self.engine.as_module():
            return self.engine.no_sync()
        return self._accelerate.no_sync(model)
