"""Trainer of transformers, and its subclasses such as those of TRL, on a tiered engine.

    from tiering.integrations.transformers import TieringTrainer

    trainer = TieringTrainer(model=model, args=args, train_dataset=data, tiering_config="ds_config.json")

For another class of trainers:

    class TieredSFTTrainer(TieringTrainerMixin, SFTTrainer): ...
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiering import _logs
from tiering.errors import CheckpointError, EngineStateError
from tiering.integrations import _training_arguments
from tiering.integrations._missing import missing
from tiering.integrations._remedies import TRAINER, named_by
from tiering.integrations._training_arguments import Config
from tiering.runtime import lr_schedules

try:
    from packaging.version import Version

    if Version(version("transformers")) < Version("5.7"):
        raise ImportError(f"transformers {version('transformers')} is installed")
    from accelerate.utils import broadcast_object_list
    from transformers import Trainer
    from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
    from transformers.trainer_utils import sort_checkpoints

    from tiering.integrations._trainer_checkpoints import TAG, last_complete, unusable
    from tiering.integrations._trainer_engine import TrainerEngines
except (ImportError, PackageNotFoundError) as error:
    raise missing("transformers", "transformers 5.7 or newer, and accelerate", "hf", error) from error

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine

__all__ = ["TieringArguments", "TieringTrainer", "TieringTrainerMixin"]

log = logging.getLogger(__name__)

_Trainer: Any = object
"""The base of the mixin. A class that has it before a Trainer has the Trainer as the next class."""


@dataclass
class TieringArguments:
    """For HfArgumentParser, next to TrainingArguments: ``TieringTrainer(..., **vars(tiering_arguments))``."""

    tiering_config: str | None = field(
        default=None, metadata={"help": "Path of the configuration of the engine, in DeepSpeed's format."}
    )


class TieringTrainerMixin(_Trainer):  # type: ignore[misc] # Any
    """Trains the model of a Trainer on a tiered engine. Name it before the class of the Trainer.

    ``tiering_config`` is a DeepSpeed configuration (a dict or a path) with an optional block "tiering"; without it, the
    attribute ``tiering_config`` of the TrainingArguments is used. "auto", and keys that the configuration lacks, take
    the values of the TrainingArguments. The section "optimizer" replaces the optimizer of the Trainer, and "scheduler"
    its schedule. ``tiering_weights`` is a file or directory of safetensors that the engine reads first values from, as
    ``initialize(weights=...)`` does. ``tiering_reference_config`` is the configuration of one more engine for each
    reference and reward model of a trainer of TRL, with budgets of its own; without it, these models stay ordinary.

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
        tiering_reference_config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        self._tiering = TrainerEngines(
            self, tiering_config, weights=tiering_weights, reference_config=tiering_reference_config
        )
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> DeepSpeedEngine:
        """The engine of the model. Raises EngineStateError before the first call that needs it."""
        if self._tiering.engine is None:
            raise EngineStateError(
                "this Trainer has no engine yet; train(), evaluate(), predict() and save_model() start it"
            )
        return self._tiering.engine

    def release(self, device: torch.device | str | None = None) -> nn.Module:
        """End the engine, and return the model with ordinary parameters, in the dtype that they had before.

        The Trainer can be used again, with a new optimizer. See ``Engine.release`` for ``device`` and errors.
        """
        self._tiering.release(device)
        return self.model

    def create_accelerator_and_postprocess(self) -> None:
        self._tiering.configure()
        _training_arguments.check(self.args)
        # One process drives one device; a Trainer without a launcher would copy the model to all GPUs.
        self.args._n_gpu = min(self.args.n_gpu, 1)
        super().create_accelerator_and_postprocess()
        self._tiering.serve(self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        if arguments["mixed_precision"] == "fp16" and self.args.device.type == "cpu":
            # Accelerate would refuse to make a GradScaler, which the engine does not need.
            arguments["mixed_precision"] = "no"
        return arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine places the parameters."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._tiering.start(training).as_module()

    # Training

    def _prepare_for_training(self, max_steps: int, *args: Any) -> Any:
        # Also of the section "scheduler", before anything is moved.
        self._tiering.settings(max_steps)
        return super()._prepare_for_training(max_steps, *args)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None and "optimizer" in self._tiering.config:
            return None
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is not None or "scheduler" not in self._tiering.config:
            return super().create_scheduler(num_training_steps, optimizer)
        section = self._tiering.settings(num_training_steps).scheduler
        assert section is not None
        schedule = getattr(lr_schedules, section.type)
        self.lr_scheduler = schedule(optimizer or self.optimizer, **section.params.model_dump())
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> float | None:
        # The step clips: gradient_clipping of the configuration is max_grad_norm.
        return self.engine.get_global_grad_norm()

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float | None:
        return self.engine.get_global_grad_norm() if grad_norm is None else grad_norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and (traffic := self._tiering.traffic) is not None:
            logs |= traffic.since_last()
        super().log(logs, *args, **kwargs)

    def end(self) -> None:
        """Close the engines, and end as ``Trainer.end`` does."""
        self._tiering.close()
        super().end()

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """``Trainer.train``; ``resume_from_checkpoint`` True is the last complete checkpoint in ``output_dir``.

        A save that was killed leaves an incomplete one: a warning names it and the reason. Raises CheckpointError if
        there are checkpoints, and none is complete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._last_complete_checkpoint() or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _last_complete_checkpoint(self) -> str | None:
        """The same on all ranks; None if ``output_dir`` has no checkpoint at all."""
        found: list[tuple[str | None, list[str]]] = [(None, [])]
        if self.args.process_index == 0:
            found = [last_complete(sort_checkpoints(self.args.output_dir))]
        if self.args.world_size > 1:
            broadcast_object_list(found)
        checkpoint, problems = found[0]
        if checkpoint is not None and problems:
            log.log(
                _logs.once(logging.WARNING),
                "resuming from %s, because the save of a later checkpoint was interrupted: %s",
                *(checkpoint, "; ".join(problems)),
            )
        elif problems:
            raise CheckpointError(
                f"no checkpoint in {self.args.output_dir} is complete: {'; '.join(problems)}; call train() without"
                " resume_from_checkpoint to start a new run"
            )
        return checkpoint

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the weights in the compute dtype, from the tiers to files, and the files that the Trainer adds."""
        directory = Path(output_dir or self.args.output_dir)
        with named_by(TRAINER):
            self._tiering.start(training=False).save_pretrained(directory)
        if not self.args.should_save:
            return
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(directory)
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            # An earlier run may have saved in this folder: with its file, an interrupted save would look complete.
            (Path(output_dir) / TRAINER_STATE_NAME).unlink(missing_ok=True)
        # As with DeepSpeed, the base model of an adapter is not in its checkpoints.
        with named_by(TRAINER):
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
        if not Path(resume_from_checkpoint).is_dir():
            raise CheckpointError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not a directory; pass a folder checkpoint-N"
                f" of a run, or True for the last complete one in {self.args.output_dir}"
            )
        problem = unusable(resume_from_checkpoint)
        if problem:
            raise CheckpointError(
                f"{resume_from_checkpoint} is not a checkpoint of a Trainer on a tiered engine, or its save was"
                f" interrupted: {problem}; to start a new run from the weights in that folder, load the"
                " model from it, and call train() without resume_from_checkpoint"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with named_by(TRAINER):
            self.engine.load_checkpoint(checkpoint, TAG)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        if (best / TAG).is_dir():
            log.info("loading the best model, from %s", best)
            with named_by(TRAINER):
                self.engine.load_checkpoint(best, TAG, load_module_only=True)
        else:
            # With save_only_model: the weights in the compute dtype.
            super()._load_best_model()


class TieringTrainer(TieringTrainerMixin, Trainer):  # type: ignore[misc] # not followed by mypy
    """``transformers.Trainer`` on a tiered engine; see TieringTrainerMixin."""
