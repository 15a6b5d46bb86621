"""initialize: from what a user has, a model and a configuration, to an engine and what goes with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from tiering import ds_config, logs
from tiering.errors import ConfigError, EngineStateError
from zero3 import resharded, schedulers
from zero3.assembly import Weights
from zero3.client_optimizer import ClientOptimizer
from zero3.collectives import standing
from zero3.engine import Engine
from zero3.init import recipe_of
from zero3.loader import TrainingLoader, make_loader
from zero3.optimizer import TieredOptimizer
from zero3.optimizer_choice import ClientOptimizerChoice, ModelParameters

log = logging.getLogger(__name__)

SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]


class EngineParts(NamedTuple):
    """What ``initialize`` returns, in DeepSpeed's order."""

    engine: Engine
    optimizer: TieredOptimizer | ClientOptimizer
    dataloader: TrainingLoader | None
    lr_scheduler: LRScheduler | None


def initialize(
    *,
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    model_parameters: ModelParameters | None = None,
    optimizer: ClientOptimizerChoice | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | SchedulerFactory | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    weights: str | Path | None = None,
    strict: bool = True,
) -> EngineParts:
    """Place ``model`` on the tiers that ``config`` allows and return (engine, optimizer, dataloader, lr_scheduler).

    ``config`` is a DeepSpeed configuration (dict or path) with an optional ``tiering`` block. ``model_parameters`` may
    be param groups with hyperparameters of their own; the default is every parameter that requires a gradient.
    ``optimizer`` (a torch optimizer over the model's parameters, or a function from them to one) replaces the section
    of that name: a class that has a kernel here gives its groups and hyperparameters, any other one steps what stays on
    the device. ``lr_scheduler`` is a torch scheduler, made for ``optimizer`` or, as a function, for the one returned;
    it replaces the section "scheduler". ``training_data`` gives a loader of shuffled micro-batches, over
    this rank's share.

    ``weights`` is a safetensors file, or a Hugging Face style directory of them: parameters take their first values
    from there, on their way to the tiers, and masters keep the precision of the file. Names that only one side has are
    an error, or with ``strict`` False a warning.

    From here on the model's parameters belong to the engine: outside of forward and backward, use ``gathered``.
    Raises ConfigError, PlacementError, WeightsError or SwapSpaceError, each before anything is moved; in mid-way
    SwapError where a disk fails, and WeightsError where a file of weights changes or cannot be read.
    """
    rank, world_size = standing()
    logs.set_rank(rank, world_size)
    logs.follow(os.environ)
    settings, report = ds_config.load(config, world_size=world_size)
    for entry in report.entries:
        log.debug("config: %s", entry)
    if torch.is_inference_mode_enabled():
        raise EngineStateError("initialize was called in inference_mode, whose tensors cannot be trained")
    _check_untouched(model)
    stored = None if weights is None else Weights(Path(weights), strict)
    engine = Engine(model, settings, model_parameters, optimizer, stored)
    try:
        scheduler = lr_scheduler
        if scheduler is None and settings.scheduler is not None:
            scheduler = schedulers.from_config(settings.scheduler, engine.optimizer)
        elif scheduler is not None and not isinstance(scheduler, LRScheduler):
            scheduler = scheduler(engine.optimizer)
        engine.lr_scheduler = scheduler
        loader = None
        if training_data is not None:
            micro_batch = settings.micro_batch_size
            loader = make_loader(training_data, micro_batch, collate_fn, rank=rank, world_size=world_size)
            engine.training_dataloader = loader
    except BaseException:
        engine.close()
        raise
    return EngineParts(engine, engine.optimizer, loader, scheduler)


def _check_untouched(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if resharded.is_adopted(param) and recipe_of(param) is None:
            raise EngineStateError(
                f"{name!r} belongs to an engine already, or did until that was closed; build the model anew and load"
                " what engine.state_dict() gave"
            )
    for name, module in model.named_modules():
        if (
            type(module).__name__ == "OptimizedModule"
        ):  # torch.compile's wrapper; asking for the class loads it
            raise ConfigError(
                f"{name or 'the model'} is wrapped by torch.compile, which does not see parameters come and go;"
                " initialize the model as it was before, with blocks that were compiled in place (block.compile())"
            )
