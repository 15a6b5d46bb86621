"""The strategy of Lightning's Trainer, without its base classes, which two namespaces of Lightning have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import tiering
from tiering.errors import ConfigError, EngineStateError
from tiering.integrations import _engines
from tiering.integrations._lightning import (
    TAG,
    StrategyOfEngines,
    check_precision,
    completed,
    is_checkpoint,
    save,
)
from tiering.integrations._remedies import LIGHTNING, named_by

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from tiering import DeepSpeedEngine

log = logging.getLogger(__name__)

_Precision: Any = object
"""The base of the mixin, as that of a strategy in _lightning.py."""


class EnginePrecision(_Precision):  # type: ignore[misc] # Any
    """The precision of an engine, which casts inputs, scales the loss and clips gradients itself."""

    def __init__(self, precision: str, engine: Callable[[], DeepSpeedEngine]) -> None:
        check_precision(precision)
        super().__init__()
        self.precision: Any = precision
        self._engine = engine

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """``LightningModule.backward`` with the loss multiplied by the loss scale."""
        model.backward(self._engine().scale(tensor), *args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Tensor | None], **kwargs: Any
    ) -> Tensor | None:
        """Run ``closure``, and update the parameters unless its ``training_step`` returned None.

        Raises EngineStateError if gradients of earlier micro-batches wait for this one.
        """
        if not model.automatic_optimization:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[no-any-return]
        loss = closure()
        if loss is not None:
            self._after_closure(model, optimizer)
            optimizer.step(**kwargs)
        elif model.trainer.accumulate_grad_batches > 1:
            raise EngineStateError(
                "training_step returned None for the last micro-batch of an update, whose backward completes the"
                " gradients of the others; leave such batches out of the data, or set accumulate_grad_batches=1"
            )
        return loss

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: str = "norm",
    ) -> None:
        """Clip the gradients of the next step by their norm. Raises ConfigError for clipping by value."""
        if clip_val <= 0:
            return
        if gradient_clip_algorithm == "value":
            raise ConfigError(
                "gradient_clip_algorithm='value' is not supported, because gradients are on tiers; use 'norm'"
            )
        optimizer.clip_grad_norm_(clip_val)


class EngineStrategy(StrategyOfEngines):
    """Trains a LightningModule on a tiered engine, on one or several ranks, on CPUs or GPUs.

    ``config`` is a DeepSpeed configuration (a dict or a path) with an optional block "tiering". Without it,
    ``offload_optimizer`` and ``offload_parameters`` ("none", "cpu" or "nvme"; True is "cpu") place optimizer state and
    parameters, ``nvme_path`` is a directory on the drive, and ``stage`` is the ZeRO stage (default 3). The Trainer's
    precision and accumulation are used; all precisions have fp32 masters. ``weights`` is a file or directory of
    safetensors that the engine reads first values from. ``kwargs`` are those of DDPStrategy that are not for
    DistributedDataParallel.

    The optimizer is the one of ``configure_optimizers``, or the section "optimizer" of ``config``. A checkpoint is a
    directory with a checkpoint of the engine; with ``weights_only`` it is a file, as in other strategies. A model built
    in ``configure_model`` gets no memory for its parameters in stage 3.

    The engine exists from the start of ``fit``, ``validate``, ``test`` or ``predict``, and keeps the parameters
    afterwards, so that ``trainer.save_checkpoint`` and ``trainer.test`` can follow ``fit``. ``release`` ends it.

    Raises ConfigError for a configuration, a precision or optimizers that an engine cannot honour.
    """

    strategy_name = "tiering"
    precision_type: type[Any]
    """The class of precisions for this namespace of Lightning."""
    schedule_type: type[Any]
    """LRSchedulerConfig of this namespace."""

    # Attributes of Lightning's class.
    lightning_module: Any
    model: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._engine: DeepSpeedEngine | None = None
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> DeepSpeedEngine:
        """The engine of the model. Raises EngineStateError before the Trainer has set it up."""
        if self._engine is None:
            raise EngineStateError(
                "the strategy has no engine yet; fit(), validate(), test() and predict() start it"
            )
        return self._engine

    def release(self, device: torch.device | str | None = None) -> nn.Module:
        """End the engine, and return the model with ordinary parameters.

        See ``Engine.release`` for ``device`` and errors.
        """
        module = self.engine.module
        _engines.release(module, device)
        self._engine = None
        self.model = self.lightning_module
        return module

    # Precision

    @property
    def precision_plugin(self) -> Any:
        """The precision of the engine, by the name that the Trainer was given."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, EnginePrecision):
            precision_plugin = self.precision_type(str(precision_plugin.precision), lambda: self.engine)
        self._precision_plugin = precision_plugin

    # Setup

    def setup(self, trainer: Any) -> None:
        """Start the engine, with an optimizer for ``fit``, unless it runs already."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == "fit"
        if self._engine is not None and self._engine.module is not self.lightning_module:
            self.release()
        if fits:
            # The engine of an earlier run ends, because its steps were those of another optimizer.
            _engines.release(self._module())
            self._start_training(trainer)
        elif self._engine is None:
            config = {key: value for key, value in self._completed(trainer).items() if key not in _TRAINING}
            self._engine = _engines.start(
                self._module(), config, processes=self.world_size, weights=self._weights
            )
        self.model = self.engine.as_module()
        self.setup_precision_plugin()
        self.barrier()

    def _start_training(self, trainer: Any) -> None:
        config = self._completed(trainer)
        optimizer = None
        self.lr_scheduler_configs = []
        if "optimizer" not in config:
            super().setup_optimizers(trainer)
            if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
                raise ConfigError(
                    f"configure_optimizers returned {len(self.optimizers) if self.optimizers[0].param_groups else 0}"
                    " optimizers; an engine has one: return one optimizer with a param group for each part of the"
                    " model, or name one in the section 'optimizer' of the configuration"
                )
            optimizer = self.optimizers[0]
        self._engine = _engines.start(
            self._module(), config, processes=self.world_size, optimizer=optimizer, weights=self._weights
        )
        if self._engine.lr_scheduler is not None:
            # The Trainer steps schedules.
            schedule, self._engine.lr_scheduler = self._engine.lr_scheduler, None
            self.lr_scheduler_configs = [self.schedule_type(schedule, interval="step")]
        self.optimizers = [self._engine.as_optimizer()]

    def _completed(self, trainer: Any) -> dict[str, Any]:
        return completed(
            self.config,
            str(self.precision_plugin.precision),
            micro_batch_size=_batch_size(trainer),
            accumulation=trainer.accumulate_grad_batches,
        )

    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    def model_to_device(self) -> None:
        """Do nothing: the engine places the parameters."""

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Build the modules of ``configure_model`` without memory for their parameters, in stage 3."""
        if self._engine is not None:
            return nullcontext()
        return tiering.zero.Init(config_dict_or_path=self._init_config(), enabled=self._builds_without_memory)

    def _init_config(self) -> dict[str, Any]:
        return completed(self.config, str(self.precision_plugin.precision))

    def teardown(self) -> None:
        """End the run of the Trainer. The engine keeps the parameters; see ``release``."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Training

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run ``closure`` and the step of the engine."""
        return self.precision_plugin.optimizer_step(
            optimizer, model=model or self.lightning_module, closure=closure, **kwargs
        )

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing: no DistributedDataParallel has to be prepared."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing, as in ``pre_backward``."""

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Let backwards inside the block only accumulate."""
        with self.engine.no_sync():
            yield

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded after ``setup``: the engine loads it."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores the optimizer: the engine does."""
        return False

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: optimizer state is in the checkpoint of the engine."""
        return {}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` writes the values."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the engine and the values of ``checkpoint`` in the directory ``filepath``.

        Without optimizer states (``weights_only``), save the values of the model and ``checkpoint`` in a file, in host
        memory whole. Raises CheckpointError if a rank cannot save, and ConfigError for ``storage_options``.
        """
        filepath = self.broadcast(filepath)
        if "optimizer_states" not in checkpoint:
            assert self.model is not None
            values = {**self.model.state_dict(), **checkpoint["state_dict"]}
            super().save_checkpoint(checkpoint | {"state_dict": values}, filepath, storage_options)
            return
        if storage_options is not None:
            raise ConfigError("storage_options is not supported, because the engine writes the checkpoint")
        skipped = ("state_dict", "optimizer_states")
        rest = {key: value for key, value in checkpoint.items() if key not in skipped}
        with named_by(LIGHTNING):
            save(self.engine, filepath, rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint of the engine in the directory ``checkpoint_path``, or read a file of Lightning."""
        checkpoint_path = self.broadcast(checkpoint_path)
        if not is_checkpoint(checkpoint_path):
            values: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return values
        with named_by(LIGHTNING):
            _, client_state = self.engine.load_checkpoint(
                checkpoint_path,
                tag=TAG,
                load_module_strict=self._module().strict_loading,
                load_lr_scheduler_states=False,
            )
        return client_state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the values of a file of Lightning; those of an engine's checkpoint are loaded already."""
        if "state_dict" not in checkpoint:
            return
        assert self.model is not None
        self.model.load_state_dict(checkpoint["state_dict"], strict=strict)
        if checkpoint.get("optimizer_states"):
            log.warning(
                "the checkpoint is a file of another strategy: its weights are loaded, and the optimizer starts with"
                " new state"
            )


_TRAINING = ("optimizer", "scheduler")
"""The sections of a configuration that only training needs."""


def _batch_size(trainer: Any) -> int:
    """The batch size of the Trainer's first loader, for the throughput that telemetry shows; 1 if it has none."""
    source = trainer.fit_loop._data_source
    loader = source.dataloader() if source.is_defined() else None
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else 1
