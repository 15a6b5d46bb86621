"""initialize: makes an engine, with its optimizer, data loader and scheduler, from a model and a configuration."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from tiering import _logs
from tiering.config import ds_config
from tiering.config.ds_config.auto import LoadContext, hidden_size_of, lookup
from tiering.config.ds_config.key_report import KeyReport
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.building.model_checks import check_model
from zero3.deepspeed import checkpointing, groups
from zero3.deepspeed.distributed import discover, init_distributed
from zero3.deepspeed.engine import DeepSpeedEngine
from zero3.loop.data_loader import TrainingLoader, make_loader
from zero3.optimizer import schedulers
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.params.compilation import unwrap
from zero3.params.precision import COMPUTE_DTYPES, keeps_dtype, warn_if_slow
from zero3.ranks.joining import standing
from zero3.ranks.mesh import place_of, sharing
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


# The signature is that of DeepSpeed; the parameters after the star are new.
def initialize(
    args: Any = None,
    model: nn.Module | DeepSpeedEngine | None = None,
    optimizer: ClientOptimizerChoice | None = None,
    model_parameters: ModelParameters | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    mesh: DeviceMesh | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
    strict_args: bool = True,
    resume: str | Path | None = None,
) -> EngineParts:
    """Place ``model`` on the tiers that ``config`` allows and return (engine, optimizer, dataloader, lr_scheduler).

    ``config`` is a DeepSpeed configuration (dict or path) with an optional ``tiering`` block; ``config_params`` and
    ``args.deepspeed_config`` are two other ways to pass it. ``args`` may be the arguments of a trainer: "auto" in the
    configuration takes the value of the field of ``args`` that has the name of Hugging Face's TrainingArguments. If the
    configuration has an "auto", or ``args`` are a TrainingArguments, each other value must equal its field of ``args``,
    which the trainer's loop uses; with ``strict_args`` False it may differ, and counts.
    ``model_parameters`` may be param groups with hyperparameters; the default is every parameter that requires a
    gradient. Without ``model_parameters`` and without any optimizer, the model is frozen, as a teacher or a reference.

    ``optimizer`` (a torch optimizer over the model's parameters, or a function that makes one from the parameters)
    replaces the section "optimizer". If its class has a kernel here, the engine takes its groups and hyperparameters;
    any other optimizer steps parameters on the device. ``lr_scheduler`` is a torch scheduler for ``optimizer``, or a
    function that makes one for the returned optimizer; it replaces the section "scheduler". ``training_data`` is loaded
    in shuffled micro-batches, a part of them on each rank. ``initialize`` joins the ranks that torchrun, Open MPI,
    MPICH or srun has started, unless they are already joined; ``dist_init_required`` and ``distributed_port`` are
    passed to ``init_distributed``.

    ``mesh`` arranges all ranks in dimensions with names: data dimensions ("data", "dp", "replicate", "shard" and so on)
    and at most those of ranks that share sequences ("sequence", "sp", "cp"; see ``tiering.sequence``), which get the
    same batches. Its data ranks determine batch sizes and loaders; state is divided among all ranks. DeepSpeed's
    ``mesh_param``, (data ranks, ranks of a sequence), its key "sequence_parallel_size", and Megatron's ``mpu`` do the
    same.

    ``weights`` is a safetensors file, or a Hugging Face style directory of them: parameters take their first values
    from there, on their way to the tiers, and masters keep the precision of the file. Names that only the model or only
    the files have are an error, or with ``strict`` False a warning.

    ``resume`` is the directory of checkpoints from which ``engine.load_checkpoint`` is called next. If it has one, and
    ``tiering.snapshots`` is true, first values of trained parameters are not written to swap space, and other calls are
    refused until ``load_checkpoint`` has loaded all of them.

    Afterwards the model's parameters belong to the engine: outside of forward and backward, use ``gathered``.
    If ``model`` has an open engine, or is one, as in a cell of a notebook that runs again, that engine ends with a
    warning, and the new one starts with the parameters: with the fp32 masters of those that were in fp32.

    Raises ConfigError, PlacementError, WeightsError, SwapSpaceError or CheckpointError before anything is moved. While
    values are moved, raises SwapError if a disk fails, and WeightsError if a file of weights changes or cannot be read.
    """
    if isinstance(model, DeepSpeedEngine):
        model = model.module
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize needs a model, a torch.nn.Module, not {type(model).__name__}")
    source = _configuration(args, config, config_params)
    rank, ranks = _join(distributed_port, dist_init_required)
    place = place_of(rank, ranks, mesh=mesh, mesh_param=mesh_param, mpu=mpu)
    _end_engine(model)
    check_model(model)
    replaced = {"optimizer": optimizer, "scheduler": lr_scheduler}
    context = LoadContext(
        hidden_size=hidden_size_of(getattr(model, "config", None)),
        dtype=_dtype_of(model),
        arguments=args,
        replaced=frozenset(section for section, by in replaced.items() if by is not None),
        strict=strict_args,
        sequence_ranks=None if place is None else place.sequence_size,
        model_ranks=1 if place is None else ranks // (place.data_size * place.sequence_size),
    )
    settings, report = ds_config.load(source, world_size=ranks, context=context)
    place = place or sharing(rank, ranks, settings.sequence_ranks)
    for entry in report.entries:
        log.debug("config: %s", entry)
    if torch.is_inference_mode_enabled():
        raise EngineStateError(
            "initialize was called in inference mode, whose tensors cannot be trained; call it outside of"
            " torch.inference_mode()"
        )
    unwrap(model)
    if lr_scheduler is not None and not (_steps(lr_scheduler) or callable(lr_scheduler)):
        raise ConfigError(f"initialize(lr_scheduler=...) {_SCHEDULERS}, not {type(lr_scheduler).__name__}")
    stored = None if weights is None else Weights(Path(weights), strict)
    settings = checkpointing.with_options(settings)
    saved = None if resume is None else Path(resume)
    engine = DeepSpeedEngine(
        model, settings, model_parameters, optimizer, stored, report.status(), saved, place
    )
    try:
        scheduler = _scheduler(lr_scheduler, settings, engine.optimizer)
        engine.lr_scheduler = scheduler
        engine.collate_fn = collate_fn
        engine.config = dict(report.filled)
        loader = None
        if training_data is not None:
            loader = make_loader(
                training_data,
                settings.micro_batch_size,
                collate_fn,
                rank=place.data_rank,
                world_size=place.data_size,
                shared=ranks > place.data_size,
                drop_last=settings.dataloader_drop_last,
            )
            engine.training_dataloader = loader
        groups.set_place(place)
        _log_once(report.short())
        warn_if_slow(settings, engine.device)
        _warn_replaced("optimizer", optimizer and engine.optimizer_name(), report)
        _warn_replaced("scheduler", lr_scheduler and type(scheduler).__name__, report)
    except BaseException:
        engine.close()
        raise
    return EngineParts(engine, engine.optimizer, loader, scheduler)


def _end_engine(model: nn.Module) -> None:
    """End the open engine of ``model``, if there is one. Raises what ``release`` raises; the engine then stays open."""
    engine = DeepSpeedEngine.of(model)
    if engine is not None:
        engine.give_back("another initialize")
        log.log(
            _logs.once(logging.WARNING),
            "initialize() was called for a model with an open engine: that engine has ended, and the new one continues"
            " from the parameters, without the optimizer state",
        )


_SCHEDULERS = "takes a scheduler with a step() method, or a function that makes one for the optimizer"


def _scheduler(
    lr_scheduler: LRScheduler | SchedulerFactory | None,
    settings: TieringConfig,
    optimizer: TieredOptimizer | ClientOptimizer,
) -> LRScheduler | None:
    """The scheduler ``lr_scheduler``, or the one that it makes, or the configuration's if it is None.

    Scripts for DeepSpeed use scheduler classes that need not be subclasses of torch's.
    """
    if lr_scheduler is None:
        section = settings.scheduler if optimizer.trains else None
        return None if section is None else schedulers.from_config(section, optimizer)
    scheduler = (
        lr_scheduler if _steps(lr_scheduler) or not callable(lr_scheduler) else lr_scheduler(optimizer)
    )
    if _steps(scheduler):
        return scheduler
    raise ConfigError(
        f"initialize(lr_scheduler=...) {_SCHEDULERS}; the function returned {type(scheduler).__name__}"
    )


def _steps(scheduler: object) -> TypeGuard[LRScheduler]:
    return not isinstance(scheduler, type) and callable(getattr(scheduler, "step", None))


def _join(port: int, required: bool | None) -> tuple[int, int]:
    """Join the ranks that a launcher has started, and name the rank in logs. Returns (rank, number of ranks)."""
    if required is None:
        discover(port)
        # A single rank of a launcher: its script may use torch.distributed.
        if os.environ.get("WORLD_SIZE") == "1":
            init_distributed(verbose=False)
    else:
        init_distributed(distributed_port=port, dist_init_required=required)
    rank, ranks = standing()
    _logs.set_rank(rank, ranks)
    _logs.follow(os.environ)
    return rank, ranks


def _configuration(
    args: Any, *configs: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any] | str | Path:
    """The configuration, from the arguments of ``initialize`` or from ``args``."""
    candidates = [*zip(("config", "config_params"), configs, strict=True)]
    candidates += [(f"args.{name}", lookup(args, name)) for name in ("deepspeed_config", "deepscale_config")]
    present = [(name, value) for name, value in candidates if value is not None and value != ""]
    of_trainer = lookup(args, "deepspeed")
    # A bool is the flag --deepspeed.
    if not present and of_trainer and isinstance(of_trainer, str | dict):
        return of_trainer
    if not present:
        raise ConfigError(
            "initialize got no configuration; pass config=..., a dict or a path, or args with deepspeed_config, which"
            " `add_config_arguments(parser)` reads from --deepspeed_config FILE"
        )
    (first_name, first), *duplicates = present
    for name, value in duplicates:
        if value != first:
            raise ConfigError(
                f"initialize got different configurations in {first_name} and {name}; pass only one of them"
            )
    return first


def _dtype_of(model: nn.Module) -> str:
    """The dtype of most elements: models in bf16 keep some parameters in fp32. Codes of a frozen base do not count."""
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point() and not keeps_dtype(param):
            elements[param.dtype] += param.numel()
    names = {dtype: name for name, dtype in COMPUTE_DTYPES.items()}
    return next((names.get(dtype, "fp32") for dtype, _ in elements.most_common(1)), "fp32")


def _warn_replaced(section: str, by: Any, report: KeyReport) -> None:
    """Warn that an argument of ``initialize`` replaces a section that the configuration has."""
    kind = next((entry.value for entry in report.entries if entry.key == f"{section}.type"), None)
    if by and kind:
        log.log(
            _logs.once(logging.WARNING),
            "the %s given to initialize() is used, the configuration's %s section (%s) is not",
            *(by, section, kind),
        )


_logged: set[str] = set()


def _log_once(line: str) -> None:
    """Log the summary of a configuration the first time that this process uses it."""
    if line not in _logged:
        _logged.add(line)
        _logs.progress().log(_logs.once(logging.INFO), "%s", line)
