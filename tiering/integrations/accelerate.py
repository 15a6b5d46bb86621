"""An Accelerator of accelerate whose models train on tiered engines.

    from tiering.integrations.accelerate import Accelerator

    accelerator = Accelerator(tiering_config="ds_config.json", gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The loop stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tiering import _logs
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from tiering.integrations import _accelerator_arguments, _engines
from tiering.integrations._accelerator_arguments import TRAINING, Config
from tiering.integrations._missing import missing
from tiering.integrations._remedies import ACCELERATOR, named_by

try:
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler
except ImportError as error:
    raise missing("accelerate", "accelerate", "accelerate", error) from error

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine

__all__ = ["Accelerator", "DummyOptim", "DummyScheduler"]

log = logging.getLogger(__name__)

TAG = "tiering"
"""The folder of the first engine's checkpoint in a folder of ``save_state``; that of the next is "tiering_1"."""

COMPLETE = "tiering_complete"
"""The file that ``save_state`` writes last."""

_ON_TIERS: dict[str, torch.Tensor] = {}
"""Stands for the weights of a model that its engine saves."""


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc] # not followed by mypy
    """The optimizer of an engine, in the loop of an Accelerator."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine.as_optimizer(), device_placement=False)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, because a gradient was not finite."""
        return bool(self.optimizer.step_was_skipped)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc] # not followed by mypy
    """``accelerate.Accelerator`` whose models train on tiered engines.

    ``tiering_config`` is a DeepSpeed configuration (a dict or a path) with an optional block "tiering"; by default it
    is the file in the environment variable TIERING_CONFIG, or the deepspeed_config_file of ``accelerate launch``.
    "auto" takes the value of the loop. ``tiering_weights`` is a file or directory of safetensors that an engine reads
    first values from, as ``initialize(weights=...)`` does. All other arguments are those of accelerate.

    ``prepare`` starts an engine for each model; a model and its one optimizer are prepared in one call. The engine owns
    the parameters of the model until ``free_memory``. With a section "optimizer" or "scheduler" in the configuration,
    pass a ``DummyOptim`` or ``DummyScheduler``. The step of the optimizer clips to the norm of
    the last ``clip_grad_norm_``. All ranks make the same calls.

    Raises ConfigError if there is no configuration, or if it contradicts the other arguments.
    """

    # Attributes of accelerate's class.
    _optimizers: list[Any]
    _schedulers: list[Any]

    def __init__(
        self,
        *args: Any,
        tiering_config: Config | None = None,
        tiering_weights: str | Path | None = None,
        mixed_precision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._config = _accelerator_arguments.source(tiering_config)
        self._weights = tiering_weights
        self._precision = _accelerator_arguments.precision(self._config, mixed_precision)
        self._by_front: dict[nn.Module, DeepSpeedEngine] = {}
        self._is_saving = False
        self._save_options: dict[str, Any] = {}
        self._load_options: dict[str, Any] = {}
        self._warned_of_clipping = False
        steps = _accelerator_arguments.accumulation(self._config)
        if steps is not None and "gradient_accumulation_plugin" not in kwargs:
            kwargs.setdefault("gradient_accumulation_steps", steps)
        # With GPUs, accelerate counts the ranks of a launcher; on CPUs only with this argument.
        kwargs.setdefault("cpu", not torch.accelerator.is_available())
        # The engine casts inputs and scales losses.
        super().__init__(*args, mixed_precision="no", **kwargs)
        # Before the hooks of the script.
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    @property
    def mixed_precision(self) -> str:
        """The precision of the engines: "no", "bf16" or "fp16"."""
        return self._precision

    def engine(self, model: nn.Module | None = None) -> DeepSpeedEngine:
        """The engine of ``model``, which ``prepare`` has returned; None is the only one.

        Raises EngineStateError if there is no such engine.
        """
        if model is None and len(self._by_front) == 1:
            return next(iter(self._by_front.values()))
        for front, engine in self._by_front.items():
            if model is front or model is engine.module:
                return engine
        count = "no engine for this model" if model is not None else f"{len(self._by_front)} engines"
        raise EngineStateError(
            f"{count}: pass a model that accelerator.prepare(model, optimizer) has returned"
        )

    def _has_engine(self, model: nn.Module) -> bool:
        return any(model in (front, engine.module) for front, engine in self._by_front.items())

    # Setup

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Start an engine for each model, with its optimizer and schedule, and return all objects in their order.

        Raises ConfigError if the optimizers or schedules do not belong to the models, and where ``initialize`` does.
        """
        models = [obj for obj in args if isinstance(obj, nn.Module) and not self._has_engine(obj)]
        optimizers = [
            obj
            for obj in args
            if isinstance(obj, Optimizer | DummyOptim) and not isinstance(obj, EngineOptimizer)
        ]
        schedule = next((obj for obj in args if isinstance(obj, DummyScheduler)), None)
        self._check_unprepared(optimizers)
        owned = _matched(models, optimizers)
        replaced: dict[int, Any] = {}
        for model, optimizer in owned:
            front = self._start(model, optimizer, schedule if optimizer is not None else None, args)
            replaced[id(model)] = front
            if optimizer is not None:
                replaced[id(optimizer)] = EngineOptimizer(self._by_front[front])
                self._optimizers.append(replaced[id(optimizer)])
                if schedule is not None:
                    wrapper = DeepSpeedSchedulerWrapper(
                        self._by_front[front].lr_scheduler, replaced[id(optimizer)]
                    )
                    replaced[id(schedule)] = wrapper
                    self._schedulers.append(wrapper)
        result = super().prepare(
            *(replaced.get(id(obj), obj) for obj in args), device_placement=device_placement
        )
        for obj in result if isinstance(result, tuple) else (result,):
            if isinstance(obj, AcceleratedScheduler):
                # accelerate looks for the optimizer with which the schedule was made.
                made_with = getattr(obj.scheduler, "optimizer", None)
                obj.optimizers = [replaced[id(made_with)]] if id(made_with) in replaced else obj.optimizers
        return result

    def _check_unprepared(self, optimizers: Sequence[Any]) -> None:
        """Raise ConfigError for an optimizer of a model that has an engine: an engine keeps its optimizer."""
        owned = {id(param) for engine in self._by_front.values() for param in engine.module.parameters()}
        if any(not owned.isdisjoint(_parameters(optimizer)) for optimizer in optimizers):
            raise ConfigError(
                "prepare() got an optimizer of a model that was prepared before; use the model and optimizer that"
                " prepare() returned, or call accelerator.free_memory(), and then pass both in one call:"
                " accelerator.prepare(model, optimizer)"
            )

    def _start(self, model: nn.Module, optimizer: Any, schedule: Any, args: Sequence[Any]) -> nn.Module:
        """Start the engine of ``model``; returns its front."""
        config = _accelerator_arguments.completed(
            self._config,
            self._precision,
            micro_batch_size=self._micro_batch_size(args),
            accumulation=self.gradient_accumulation_steps,
        )
        options: dict[str, Any] = {"weights": self._weights}
        if optimizer is None:
            config = {key: value for key, value in config.items() if key not in TRAINING}
        else:
            self._check_placeholders(optimizer, schedule)
            if isinstance(optimizer, DummyOptim):
                config = _accelerator_arguments.with_optimizer(config, optimizer)
                options["model_parameters"] = optimizer.params
            else:
                options["optimizer"] = optimizer
                # The engine makes the steps that torch's schedules look for.
                optimizer._opt_called = True
            if schedule is None:
                config.pop("scheduler", None)
            elif schedule.lr_scheduler_callable is not None:
                options["lr_scheduler"] = schedule.lr_scheduler_callable
            else:
                processes = 1 if self.split_batches else self.num_processes
                config = _accelerator_arguments.with_schedule(config, schedule, processes)
        engine = _engines.start(model, config, processes=self.num_processes, device=self.device, **options)
        front = engine.as_module()
        self._by_front[front] = engine
        return front

    def _check_placeholders(self, optimizer: Any, schedule: Any) -> None:
        """Check that the loop has a placeholder for each section of the configuration, and no other."""
        given = {
            "optimizer": isinstance(optimizer, DummyOptim),
            "scheduler": schedule is not None and schedule.lr_scheduler_callable is None,
        }
        for section, is_placeholder in given.items():
            name = "DummyOptim" if section == "optimizer" else "DummyScheduler"
            if is_placeholder and section not in self._config:
                raise ConfigError(
                    f"prepare() got a {name}, and the configuration has no section {section!r}; add the section, or"
                    f" pass a torch {section}"
                )
            if section in self._config and not is_placeholder:
                raise ConfigError(
                    f"the configuration has a section {section!r}, and prepare() got no {name}; remove the section, or"
                    f" pass tiering.integrations.accelerate.{name}"
                )

    def _micro_batch_size(self, args: Sequence[Any]) -> int:
        """The batch size of the first loader in ``args``, on one rank; 1 without a loader."""
        for loader in args:
            if isinstance(loader, DataLoader):
                sampler = loader.batch_sampler
                size = loader.batch_size or getattr(sampler, "batch_size", None) or 1
                return max(1, size // self.num_processes if self.split_batches else size)
        return 1

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model on an engine that does not train, or ``model`` itself if it has an engine."""
        if not self._has_engine(model):
            model = self._start(model, None, None, ())
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """``optimizer``, if ``prepare`` has returned it. Raises ConfigError for any other."""
        if isinstance(optimizer, EngineOptimizer):
            return optimizer
        raise ConfigError(_WITHOUT_MODEL)

    def free_memory(self, *objects: Any) -> Any:
        """End the engines, and then free memory as accelerate does.

        The parameters of a model are ordinary again, if they fit in memory; otherwise they cannot be used any more.
        """
        for engine in self._by_front.values():
            engine.destroy()
            _engines.set_synced(engine, False)
        self._by_front = {}
        return super().free_memory(*objects)

    # Training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Accumulate the gradients of ``loss``, divided by gradient_accumulation_steps.

        Raises EngineStateError if several engines train in fp16, because each has its own loss scale.
        """
        training = [engine for engine in self._by_front.values() if engine.optimizer.trains]
        if len(training) == 1:
            training[0].backward(loss / self.gradient_accumulation_steps, **kwargs)
            return
        if training and self._precision == "fp16":
            raise EngineStateError(
                f"accelerator.backward(loss) was called with {len(training)} trained models in fp16, each with its own"
                " loss scale; use bf16, or call accelerator.engine(model).backward(loss)"
            )
        super().backward(loss, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backwards in the block only accumulate, also on one rank."""
        if self._has_engine(model):
            return self.engine(model).no_sync()
        no_sync: AbstractContextManager[None] = super().no_sync(model)
        return no_sync

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip in the next step of the optimizer; returns the norm before clipping.

        ``parameters`` are all parameters of one prepared model. The step clips the sum of all micro-batches once: calls
        before the last micro-batch of an update only return the norm so far, with a warning. Raises ConfigError for
        other parameters and norms, and where ``clip_grad_norm_`` of the engine's optimizer does.
        """
        clipped = {
            id(param) for param in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)
        }
        engines = [
            engine
            for engine in self._by_front.values()
            if any(id(param) in clipped for param in engine.module.parameters())
        ]
        trained = {
            id(param)
            for engine in engines
            for group in engine.optimizer.param_groups
            for param in group["params"]
        }
        if len(engines) != 1 or not trained <= clipped:
            raise ConfigError(
                f"clip_grad_norm_ got parameters of {len(engines)} prepared models, or a part of those of a model; the"
                " gradients of a model are clipped together: call accelerator.clip_grad_norm_(model.parameters(), ...)"
            )
        if float(norm_type) != 2:
            raise ConfigError(f"unsupported norm_type={norm_type}; an engine clips to the 2-norm")
        if not self.sync_gradients and not self._warned_of_clipping:
            self._warned_of_clipping = True
            log.log(
                _logs.once(logging.WARNING),
                "clip_grad_norm_ was called before the last micro-batch of an update. The gradients are clipped once,"
                " as a sum, in the step of the optimizer; without tiering, each call clips what has accumulated until"
                " then. Call it in a block `if accelerator.sync_gradients:`",
            )
        return torch.tensor(engines[0].as_optimizer().clip_grad_norm_(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raises ConfigError: an engine clips to a norm."""
        raise ConfigError("clip_grad_value_ is not supported by an engine; use accelerator.clip_grad_norm_")

    # Models

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model that was prepared."""
        model = self.engine(model).module if self._has_engine(model) else model
        unwrapped: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The values of ``model`` in host memory, in the compute dtype. All ranks call it together."""
        if self._is_saving and self._has_engine(model):
            return _ON_TIERS
        return super().get_state_dict(model, unwrap)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the values of ``model`` as safetensors, from the tiers to files; see ``Engine.save_pretrained``.

        Raises ConfigError without ``safe_serialization``.
        """
        if not self._has_engine(model):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        if not safe_serialization:
            raise ConfigError(
                "save_model(safe_serialization=False) is not supported by an engine; it writes safetensors"
            )
        self.engine(model).save_pretrained(save_directory, max_shard_size)

    # Checkpoints

    def save_state(
        self,
        output_dir: str | Path | None = None,
        *args: Any,
        exclude_frozen_parameters: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Save as accelerate does, with a checkpoint of each engine in place of its weights and optimizer state.

        ``exclude_frozen_parameters`` is that of ``Engine.save_checkpoint``. A save into a folder that has a checkpoint
        replaces it; if it is interrupted, neither is complete.
        """
        self._is_saving = True
        self._save_options = {"exclude_frozen_parameters": exclude_frozen_parameters}
        try:
            with named_by(ACCELERATOR):
                directory = super().save_state(output_dir, *args, **kwargs)
        finally:
            self._is_saving = False
        self.wait_for_everyone()
        if self.is_main_process:
            (Path(directory) / COMPLETE).touch()
        self.wait_for_everyone()
        return directory

    def load_state(
        self,
        input_dir: str | Path | None = None,
        *args: Any,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load what ``save_state`` has saved; any number of ranks may have saved it.

        None is the last complete checkpoint, with automatic checkpoint naming. ``load_module_strict``,
        ``load_optimizer_states`` and ``load_lr_scheduler_states`` are those of ``Engine.load_checkpoint``; without the
        last two, optimizers and schedules that were prepared stay as they are. Raises CheckpointError if the save was
        interrupted, and where ``Engine.load_checkpoint`` does.
        """
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = self._last_complete()
        self._load_options = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
        }
        optimizers, schedulers = self._optimizers, self._schedulers
        # accelerate would load the options of the optimizer, and the state of the schedule, after the engines.
        self._optimizers = optimizers if load_optimizer_states else []
        self._schedulers = schedulers if load_lr_scheduler_states else []
        try:
            with named_by(ACCELERATOR):
                super().load_state(None if input_dir is None else str(input_dir), *args, **kwargs)
        finally:
            self._optimizers, self._schedulers = optimizers, schedulers

    def _last_complete(self) -> Path | None:
        folders = [
            path.parent for path in Path(self.project_dir, "checkpoints").glob(f"checkpoint_*/{COMPLETE}")
        ]
        return max(folders, key=lambda path: int(path.name.rpartition("_")[2]), default=None)

    def _save_engines(
        self, models: list[nn.Module], weights: list[Mapping[str, Any]], output_dir: str
    ) -> None:
        weights[:] = [values for values in weights if values is not _ON_TIERS]
        if self.is_main_process:
            (Path(output_dir) / COMPLETE).unlink(missing_ok=True)
        self.wait_for_everyone()
        for tag, engine in self._tagged(models):
            engine.save_checkpoint(output_dir, tag, save_latest=False, **self._save_options)

    def _load_engines(self, models: list[nn.Module], input_dir: str) -> None:
        if not (Path(input_dir) / COMPLETE).is_file():
            raise CheckpointError(
                f"{input_dir} is not a checkpoint of an Accelerator with tiered engines, or its save was interrupted:"
                f" {COMPLETE} is missing; load the checkpoint before it"
            )
        for tag, engine in self._tagged(models):
            engine.load_checkpoint(input_dir, tag, **self._load_options)
        models[:] = [model for model in models if not self._has_engine(model)]

    def _tagged(self, models: Iterable[nn.Module]) -> list[tuple[str, DeepSpeedEngine]]:
        engines = [self.engine(model) for model in models if self._has_engine(model)]
        return [(f"{TAG}_{number}" if number else TAG, engine) for number, engine in enumerate(engines)]


_WITHOUT_MODEL = (
    "prepare() got an optimizer without its model; call accelerator.prepare(model, optimizer) with both"
)


def _matched(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[tuple[nn.Module, Any]]:
    """Each model with the optimizer of its parameters, or None."""
    optimizers_of: dict[int, list[Any]] = {id(model): [] for model in models}
    for optimizer in optimizers:
        params = _parameters(optimizer)
        owners = [model for model in models if not params.isdisjoint(map(id, model.parameters()))]
        if not owners:
            raise ConfigError(_WITHOUT_MODEL)
        if len(owners) > 1:
            raise ConfigError(
                f"prepare() got an optimizer with parameters of {len(owners)} models; each model has an engine of its"
                " own, which keeps its optimizer: make an optimizer for each model, or prepare one nn.Module whose"
                " forward calls all of them"
            )
        optimizers_of[id(owners[0])].append(optimizer)
    most = max(map(len, optimizers_of.values()), default=0)
    if most > 1:
        raise ConfigError(
            f"prepare() got {most} optimizers of a model; an engine has one: pass one optimizer with a param group for"
            " each part of the model"
        )
    return [(model, next(iter(optimizers_of[id(model)]), None)) for model in models]


def _parameters(optimizer: Any) -> set[int]:
    """The identities of the parameters of ``optimizer``."""
    if isinstance(optimizer, DummyOptim):
        # The parameters may be an iterator.
        optimizer.params = list(optimizer.params)
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in optimizer.params]
    else:
        groups = optimizer.param_groups
    return {id(param) for group in groups for param in group["params"]}
