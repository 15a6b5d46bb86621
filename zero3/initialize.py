"""initialize: from what a user has, a model and a configuration, to an engine and what goes with it."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from tiering import logs
from tiering.config import ds_config
from tiering.config.ds_config.auto import LoadContext, hidden_size_of, lookup
from tiering.config.ds_config.report import Report
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.building.model_checks import check_model
from zero3.deepspeed.distributed import discover, init_distributed
from zero3.deepspeed.engine import DeepSpeedEngine
from zero3.loop.data_loader import TrainingLoader, make_loader
from zero3.optimizer import schedulers
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.compiled_modules import unwrap
from zero3.params.precision import COMPUTE_DTYPES
from zero3.ranks.joining import standing
from zero3.setup.assembly import Weights
from zero3.setup.optimizer_choice import ClientOptimizerChoice, ModelParameters

log = logging.getLogger(__name__)

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class EngineParts(NamedTuple):
    """What ``initialize`` returns, in DeepSpeed's order."""

    engine: DeepSpeedEngine
    optimizer: TieredOptimizer | ClientOptimizer
    dataloader: TrainingLoader | None
    lr_scheduler: LRScheduler | None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizerChoice | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    distributed_port: int = 29500,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    weights: str | Path | None = None,
    strict: bool = True,
) -> EngineParts:
    """Place ``model`` on the tiers that ``config`` allows and return (engine, optimizer, dataloader, lr_scheduler).

    ``config`` is a DeepSpeed configuration (dict or path) with an optional ``tiering`` block; ``config_params`` and
    ``args.deepspeed_config`` are other ways to give it. ``args`` may be a trainer's: "auto" in the configuration is
    filled in from what goes by the names of Hugging Face's TrainingArguments there. ``model_parameters`` may be param
    groups with hyperparameters of their own; the default is every parameter that requires a gradient.
    Without them, and with no optimizer named anywhere, the model is frozen, as a teacher or a reference.
    ``optimizer`` (a torch optimizer over the model's parameters, or a function from them to one) replaces the section
    of that name: a class that has a kernel here gives its groups and hyperparameters, any other one steps what stays on
    the device. ``lr_scheduler`` is a torch scheduler, made for ``optimizer`` or, as a function, for the one returned;
    it replaces the section "scheduler". ``training_data`` gives a loader of shuffled micro-batches, over
    this rank's share. The ranks that torchrun, Open MPI, MPICH or srun has started are joined, unless they have been;
    ``dist_init_required`` and ``distributed_port`` are those of ``init_distributed``.

    ``weights`` is a safetensors file, or a Hugging Face style directory of them: parameters take their first values
    from there, on their way to the tiers, and masters keep the precision of the file. Names that only one side has are
    an error, or with ``strict`` False a warning.

    From here on the model's parameters belong to the engine: outside of forward and backward, use ``gathered``.
    Raises ConfigError, PlacementError, WeightsError or SwapSpaceError, each before anything is moved; in mid-way
    SwapError where a disk fails, and WeightsError where a file of weights changes or cannot be read.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize needs a model, a torch.nn.Module, not {type(model).__name__}")
    if mpu is not None or mesh_param is not None:
        raise ConfigError(
            "initialize got mpu or mesh_param, which split a model over ranks in other ways; not supported in this"
            " version: leave them out, and all ranks are data parallel"
        )
    given = _given(args, config, config_params)
    rank, world_size = _join(distributed_port, dist_init_required)
    check_model(model)
    replaced = {"optimizer": optimizer, "scheduler": lr_scheduler}
    known = LoadContext(
        hidden_size=hidden_size_of(getattr(model, "config", None)),
        dtype=_dtype_of(model),
        arguments=args,
        replaced=frozenset(section for section, by in replaced.items() if by is not None),
    )
    settings, report = ds_config.load(given, world_size=world_size, context=known)
    for entry in report.entries:
        log.debug("config: %s", entry)
    if torch.is_inference_mode_enabled():
        raise EngineStateError("initialize was called in inference_mode, whose tensors cannot be trained")
    unwrap(model)
    if lr_scheduler is not None and not (_steps(lr_scheduler) or callable(lr_scheduler)):
        raise ConfigError(f"initialize(lr_scheduler=...) {_SCHEDULERS}, not {type(lr_scheduler).__name__}")
    stored = None if weights is None else Weights(Path(weights), strict)
    engine = DeepSpeedEngine(model, settings, model_parameters, optimizer, stored, report.status())
    try:
        scheduler = _scheduler(lr_scheduler, settings, engine.optimizer)
        engine.lr_scheduler = scheduler
        engine.collate_fn = collate_fn
        loader = None
        if training_data is not None:
            loader = make_loader(
                training_data,
                settings.micro_batch_size,
                collate_fn,
                rank=rank,
                world_size=world_size,
                drop_last=settings.dataloader_drop_last,
            )
            engine.training_dataloader = loader
        _say_once(report.short())
        _say_replaced("optimizer", optimizer and engine.optimizer_name(), report)
        _say_replaced("scheduler", lr_scheduler and type(scheduler).__name__, report)
    except BaseException:
        engine.close()
        raise
    return EngineParts(engine, engine.optimizer, loader, scheduler)


_SCHEDULERS = (
    "takes a scheduler, with a step() as torch's have, or a function of the optimizer that makes one"
)


def _scheduler(
    given: LRScheduler | SchedulerFactory | None,
    settings: TieringConfig,
    optimizer: TieredOptimizer | ClientOptimizer,
) -> LRScheduler | None:
    """``given``, or what it makes; without it the configuration's.

    Scripts for DeepSpeed bring classes of their own, which need be no torch's.
    """
    if given is None:
        wanted = settings.scheduler if optimizer.trains else None
        return None if wanted is None else schedulers.from_config(wanted, optimizer)
    made = given if _steps(given) or not callable(given) else given(optimizer)
    if _steps(made):
        return made
    raise ConfigError(f"initialize(lr_scheduler=...) {_SCHEDULERS}; the function made {type(made).__name__}")


def _steps(given: object) -> TypeGuard[LRScheduler]:
    return not isinstance(given, type) and callable(getattr(given, "step", None))


def _join(port: int, required: bool | None) -> tuple[int, int]:
    """This rank and the number of them, of what a launcher has started; from now on logs know it."""
    if required is None:
        discover(port)
        # one rank of a launcher, whose script may ask torch.distributed for it
        if os.environ.get("WORLD_SIZE") == "1":
            init_distributed(verbose=False)
    else:
        init_distributed(distributed_port=port, dist_init_required=required)
    rank, world_size = standing()
    logs.set_rank(rank, world_size)
    logs.follow(os.environ)
    return rank, world_size


def _given(args: Any, *configs: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | str | Path:
    """The one configuration that there is, as an argument of ``initialize`` or in ``args``."""
    ways = [*zip(("config", "config_params"), configs, strict=True)]
    ways += [(f"args.{name}", lookup(args, name)) for name in ("deepspeed_config", "deepscale_config")]
    found = [(name, value) for name, value in ways if value is not None and value != ""]
    trainers = lookup(args, "deepspeed")
    if not found and trainers and isinstance(trainers, str | dict):  # else it is the flag --deepspeed
        return trainers
    if not found:
        raise ConfigError(
            "initialize got no configuration; give it config=..., a dict or a path, or args with deepspeed_config, as"
            " `add_config_arguments(parser)` makes it of --deepspeed_config FILE"
        )
    (first, chosen), *others = found
    for other, value in others:
        if value != chosen:
            raise ConfigError(
                f"initialize got a configuration as {first} and another as {other}; give one of them"
            )
    return chosen


def _dtype_of(model: nn.Module) -> str:
    """That of most of its parameters: models in bf16 keep single ones in fp32."""
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            elements[param.dtype] += param.numel()
    names = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    return next((names.get(dtype, "fp32") for dtype, _ in elements.most_common(1)), "fp32")


def _say_replaced(section: str, by: Any, report: Report) -> None:
    """That the object given to ``initialize`` counts, and not the section that the configuration has, too."""
    kind = next((entry.value for entry in report.entries if entry.key == f"{section}.type"), None)
    if by and kind:
        log.log(
            logs.once(logging.WARNING),
            "the %s given to initialize() is used, the configuration's %s section (%s) is not",
            *(by, section, kind),
        )


_said: set[str] = set()


def _say_once(line: str) -> None:
    """What a configuration comes to: the first time that this process trains with it."""
    if line not in _said:
        _said.add(line)
        logs.progress().log(logs.once(logging.INFO), "%s", line)
