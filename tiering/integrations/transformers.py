"""Trainer of transformers, and its subclasses such as those of TRL, on a tiered engine.

    from tiering.integrations.transformers import TieringTrainer

    trainer = TieringTrainer(model=model, args=args, train_dataset=data, tiering_config="ds_config.json")

For another class of trainers:

    class TieredSFTTrainer(TieringTrainerMixin, SFTTrainer): ...
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

import tiering
from tiering.config import ds_config
from tiering.config.ds_config.auto import hidden_size_of
from tiering.config.training import TieringConfig
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from tiering.integrations import _training_arguments
from tiering.integrations._traffic import Traffic
from tiering.integrations._training_arguments import Config
from tiering.runtime import lr_schedules

try:
    if int(version("transformers").partition(".")[0]) < 5:
        raise ImportError(f"transformers {version('transformers')} is installed")
    from accelerate.utils import broadcast_object_list
    from transformers import PreTrainedModel, Trainer
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
    from transformers.trainer_utils import sort_checkpoints
except (ImportError, PackageNotFoundError) as error:
    raise ImportError(
        "tiering.integrations.transformers needs transformers 5 and accelerate; install them with"
        f" `pip install 'tiering[hf]'` ({error})"
    ) from error

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine

__all__ = ["TieringArguments", "TieringTrainer", "TieringTrainerMixin"]

log = logging.getLogger(__name__)

_Trainer: Any = object
"""The base of the mixin. A class that has it before a Trainer has the Trainer as the next class."""

TAG = "tiering"
"""The folder of the engine's checkpoint in a folder "checkpoint-N" of a Trainer."""

_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[DeepSpeedEngine], torch.dtype]]
_engines = weakref.WeakKeyDictionary()
"""The engine of each model, and the dtype that the model had before, for another Trainer of the same model."""


@dataclass
class TieringArguments:
    """For HfArgumentParser, next to TrainingArguments: ``TieringTrainer(..., **vars(tiering_arguments))``."""

    tiering_config: str | None = field(
        default=None, metadata={"help": "Path of the configuration of the engine, in DeepSpeed's format."}
    )


class _Accelerate(NamedTuple):
    """The methods of a Trainer's Accelerator that the mixin replaces."""

    unwrap_model: Callable[..., nn.Module]
    backward: Callable[..., None]
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]


class TieringTrainerMixin(_Trainer):  # type: ignore[misc] # Any
    """Trains the model of a Trainer on a tiered engine. Name it before the class of the Trainer.

    ``tiering_config`` is a DeepSpeed configuration (a dict or a path) with an optional block "tiering"; without it, the
    attribute ``tiering_config`` of the TrainingArguments is used. "auto", and keys that the configuration lacks, take
    the values of the TrainingArguments. The section "optimizer" replaces the optimizer of the Trainer, and "scheduler"
    its schedule. ``tiering_weights`` is a file or directory of safetensors that the engine reads first values from, as
    ``initialize(weights=...)`` does.

    The engine starts with the first call that needs it (``train``, ``evaluate``, ``predict``, ``save_model``). It then
    owns the parameters of the model, until ``release``. All ranks make the same calls.

    Raises ConfigError if there is no configuration, if values differ from those of the TrainingArguments, or if the
    TrainingArguments have settings that the engine cannot honour.
    """

    model: nn.Module
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        tiering_config: Config | None = None,
        tiering_weights: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        self._tiering_source = tiering_config
        self._tiering_weights = tiering_weights
        self._engine: DeepSpeedEngine | None = None
        self._traffic: Traffic | None = None
        self._dtype = torch.float32
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> DeepSpeedEngine:
        """The engine of the model. Raises EngineStateError before the first call that needs it."""
        if self._engine is None:
            raise EngineStateError(
                "this Trainer has no engine yet; train(), evaluate(), predict() and save_model() start it"
            )
        return self._engine

    def release(self, device: torch.device | str | None = None) -> nn.Module:
        """End the engine, and return the model with ordinary parameters, in the dtype that they had before.

        The Trainer can be used again, with a new optimizer. See ``Engine.release`` for ``device`` and errors.
        """
        if self._engine is not None:
            _release(self._engine, self._dtype, device)
            self._forget_engine()
        return self.model

    # The engine

    def create_accelerator_and_postprocess(self) -> None:
        source = self._tiering_source or getattr(self.args, "tiering_config", None)
        if source is None:
            raise ConfigError(
                f"{type(self).__name__} needs a configuration: pass tiering_config=, a path or a dict, or set the"
                " attribute tiering_config of the TrainingArguments"
            )
        self._config = _training_arguments.completed(source)
        _training_arguments.check(self.args)
        # One process drives one device; a Trainer without a launcher would copy the model to all GPUs.
        self.args._n_gpu = min(self.args.n_gpu, 1)
        super().create_accelerator_and_postprocess()
        # The engine scales the loss.
        self.accelerator.scaler = None
        self._accelerate = _Accelerate(
            self.accelerator.unwrap_model, self.accelerator.backward, self.accelerator.no_sync
        )
        self.accelerator.unwrap_model = self._unwrapped
        self.accelerator.backward = self._backward
        self.accelerator.no_sync = self._no_sync

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if arguments["mixed_precision"] == "fp16" and self.args.device.type == "cpu":
            # Accelerate would refuse to make a GradScaler, which the engine does not need.
            arguments["mixed_precision"] = "no"
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine places the parameters."""

    def _unwrapped(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        engine = self._engine
        if engine is not None and model is engine.as_module():
            model = engine.module
        return self._accelerate.unwrap_model(model, *args, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        self._start_engine(training)
        return self.engine.as_module()

    def _start_engine(self, training: bool) -> None:
        """Start the engine of the model, unless it runs. If the Trainer has data to train with, the engine trains."""
        training = training or self.train_dataset is not None
        if self._engine is not None:
            if self._engine.module is self.model:
                return
            # model_init has made another model.
            self._engine.close()
            self._forget_engine()
        _release_from_others(self.model)
        config = {key: value for key, value in self._config.items() if key != "scheduler"}
        optimizer = self.create_optimizer() if training else None
        if not training:
            config.pop("optimizer", None)
        self._dtype = _training_arguments.dtype_of(self.model)
        with _computing_on(self.args.device):
            self._engine = tiering.initialize(
                args=_training_arguments.known(self.args, self.model, self.state.max_steps),
                model=self.model,
                optimizer=optimizer,
                config=config,
                weights=self._tiering_weights,
            ).engine
        _engines[self.model] = weakref.ref(self._engine), self._dtype
        self._traffic = Traffic(self._engine.snapshot)
        if training:
            self.optimizer = self._engine.as_optimizer()
            # Otherwise Accelerate would wrap it, to scale the loss.
            self.optimizer._is_accelerate_prepared = True
        _set_synced(self._engine)

    def _forget_engine(self) -> None:
        self._engine = self._traffic = None
        self.optimizer = self.lr_scheduler = None
        self.model_wrapped = self.model

    # Training

    def _prepare_for_training(self, max_steps: int, *args: Any) -> Any:
        # Also the section "scheduler", before anything is moved.
        self._settings(max_steps)
        return super()._prepare_for_training(max_steps, *args)

    def _settings(self, max_steps: int) -> TieringConfig:
        """The settings of a run of ``max_steps`` updates."""
        context = ds_config.LoadContext(
            hidden_size=hidden_size_of(getattr(self.model, "config", None)),
            arguments=_training_arguments.known(self.args, self.model, max_steps),
        )
        return ds_config.load(self._config, world_size=self.args.world_size, context=context)[0]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and "optimizer" in self._config:
            return None
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        section = self._settings(num_training_steps).scheduler if "scheduler" in self._config else None
        if section is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        schedule = getattr(lr_schedules, section.type)
        self.lr_scheduler = schedule(optimizer or self.optimizer, **section.params.model_dump())
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if self._engine is None:
            self._accelerate.backward(loss, **kwargs)
        else:
            self._engine.backward(loss, **kwargs)

    def _no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        # Accelerate's has no effect in a single process; the engine uses it there, too.
        engine = self._engine
        if engine is not None and model is engine.as_module():
            return engine.no_sync()
        return self._accelerate.no_sync(model)

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        # The step clips: max_grad_norm is the configuration's gradient_clipping.
        return self.engine.get_global_grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self.engine.get_global_grad_norm() if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._traffic is not None and "loss" in logs:
            logs |= self._traffic.since_last()
        super().log(logs, *args, **kwargs)

    def end(self) -> None:
        """Close the engine, and end as ``Trainer.end`` does."""
        if self._engine is not None:
            self._engine.close()
        super().end()

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; ``resume_from_checkpoint`` True is the last checkpoint whose save was not interrupted."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_complete_checkpoint() or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _last_complete_checkpoint(self) -> str | None:
        """The last checkpoint in output_dir with all its files; the same on all ranks."""
        checkpoints = sort_checkpoints(self.args.output_dir)
        complete = [path for path in checkpoints if not _missing_files(path)]
        found = [complete[-1] if complete else None]
        if found[0] is not None and found[0] != checkpoints[-1]:
            log.warning(
                "%s is incomplete, because its save was interrupted; resuming from %s",
                checkpoints[-1],
                found[0],
            )
        if self.args.world_size > 1:
            broadcast_object_list(found)
        return found[0]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the weights in the compute dtype, from the tiers to files, and the files that the Trainer adds."""
        directory = Path(output_dir or self.args.output_dir)
        self._start_engine(training=False)
        self.engine.save_pretrained(directory)
        if not self.args.should_save:
            return
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(directory)
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # As with DeepSpeed, the base model of an adapter is not in its checkpoints.
        self.engine.save_checkpoint(
            output_dir, TAG, exclude_frozen_parameters=hasattr(self.model, "peft_config")
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        # The file that the Trainer writes next says that the checkpoint is complete.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Check that the checkpoint is one of an engine: it is loaded when the engine has started."""
        missing = _missing_files(resume_from_checkpoint)
        if missing:
            raise CheckpointError(
                f"{resume_from_checkpoint} is not a checkpoint of a Trainer on a tiered engine, or its save was"
                f" interrupted: {missing} is missing; to start a new run from the weights in that folder, load the"
                " model from it, and call train() without resume_from_checkpoint"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.engine.load_checkpoint(checkpoint, TAG)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self) -> None:
        log.info("loading the best model, from %s", self.state.best_model_checkpoint)
        self.engine.load_checkpoint(self.state.best_model_checkpoint, TAG, load_module_only=True)


class TieringTrainer(TieringTrainerMixin, Trainer):  # type: ignore[misc] # not followed by mypy
    """``transformers.Trainer`` on a tiered engine; see TieringTrainerMixin."""


@contextmanager
def _computing_on(device: torch.device) -> Iterator[None]:
    """Engines that start in the block compute on the device of the Trainer, where its batches are."""
    before = os.environ.get("TIERING_DEVICE")
    os.environ["TIERING_DEVICE"] = device.type
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIERING_DEVICE"]
        else:
            os.environ["TIERING_DEVICE"] = before


def _missing_files(checkpoint: str) -> str:
    """The files that a complete checkpoint has and this one lacks; empty if it is complete."""
    needed = (TRAINER_STATE_NAME, SCHEDULER_NAME, f"{TAG}/checkpoint.json")
    return ", ".join(name for name in needed if not (Path(checkpoint) / name).is_file())


def _release_from_others(model: nn.Module) -> None:
    """Release ``model`` from the engine of another Trainer."""
    reference, dtype = _engines.pop(model, (None, torch.float32))
    engine = None if reference is None else reference()
    if engine is not None:
        _release(engine, dtype)


def _release(engine: DeepSpeedEngine, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
    """Release the model of ``engine``, whose parameters had ``dtype`` before."""
    engine.release(device, masters=dtype == torch.float32)
    _set_synced(engine, False)


def _set_synced(engine: DeepSpeedEngine, synced: bool = True) -> None:
    """Make ``generate`` run until the last rank has its tokens, if each forward needs all ranks.

    transformers does this for models that have its mark of a sharded model.
    """
    if engine.world_size > 1 and engine.zero_optimization_partition_weights():
        for module in engine.module.modules():
            if isinstance(module, PreTrainedModel):
                module._is_fsdp_managed_module = synced
