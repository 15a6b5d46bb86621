"""plan_for: the plan of a model that is here, on meta, or only described by a transformers configuration."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiering.config import ds_config
from tiering.config.training import IoConfig, TieringConfig
from tiering.errors import ConfigError
from tiering.placement.plan import Workload
from tiering.planning import measure
from tiering.planning.measure import Measurement, quietly
from tiering.planning.rates import Rates
from tiering.planning.report import PlanReport, report
from tiering.planning.setting import TOKENS, RatesOf, Setting
from tiering.planning.sizing import format_count
from zero3.observe import device_rates
from zero3.setup.model_size import size_up
from zero3.setup.optimizer_choice import ClientOptimizerChoice, ModelParameters, choose_optimizer

ATTENTION = ("num_attention_heads", "num_hidden_layers", "hidden_size")  # a state space model has no heads
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # how many there are, by architecture


def plan_for(
    *,
    model: nn.Module | str | Path,
    config: TieringConfig | Mapping[str, Any] | str | Path,
    model_parameters: ModelParameters | None = None,
    optimizer: ClientOptimizerChoice | None = None,
    world_size: int = 1,
    ranks_per_node: int | None = None,
    gpu_memory: int | None = None,
    rates: RatesOf | None = None,
    tokens: int = TOKENS,
    sequence: int | None = None,
    checkpointed: bool = False,
    endurance: float | None = None,
) -> PlanReport:
    """What ``initialize`` would place where, without placing anything; with ``rates``, how long a step would take.

    ``model`` may be on the meta device, built under ``tiering.zero.Init``, or the path of a transformers configuration
    (a config.json or the directory of one). ``config``, ``model_parameters`` and ``optimizer`` are those of
    ``initialize``. ``ranks_per_node`` is all of ``world_size`` unless told. ``gpu_memory`` is the bytes that the GPU of
    each rank has free; without, the CPU is the device. ``tokens`` are those of a micro-batch and rank, in sequences of
    ``sequence`` (one, unless told); ``checkpointed`` tells of activation checkpointing, and ``endurance`` is in bytes
    written to a node's drives.

    A model that does not fit is no error: the report then says why, and what would make it fit. Raises ConfigError for
    a configuration, or a model, that cannot be trained as asked.
    """
    settings = (
        config if isinstance(config, TieringConfig) else ds_config.load(config, world_size=world_size)[0]
    )
    setting = Setting(
        world_size=world_size,
        local_size=world_size if ranks_per_node is None else ranks_per_node,
        gpu_memory=gpu_memory,
        tokens=tokens,
        sequence=sequence,
        checkpointed=checkpointed,
        endurance=endurance,
    )
    built = model if isinstance(model, nn.Module) else described(Path(model))
    if model_parameters is None:  # what is planned is trained
        model_parameters = [param for param in built.parameters() if param.requires_grad]
    chosen = choose_optimizer(built, settings, model_parameters, optimizer)
    sized = size_up(built, settings, chosen, on_gpu=gpu_memory is not None, world_size=world_size)
    params = sum(param.numel() for param in built.parameters())
    name = f"{type(built).__name__} of {format_count(params)} parameters"
    return report(
        name,
        params,
        sized.workload,
        settings,
        setting,
        rates or Rates(),
        active=_active(built),
        attention_flops=_attention_flops(built, setting),
    )


def _active(model: nn.Module) -> float:
    """The share of the parameters that a token passes: of the experts of transformers' models, those it is sent to."""
    told: Any = getattr(model, "config", None)
    chosen: int | None = getattr(told, "num_experts_per_tok", None)
    count: int | None = next(
        (each for name in EXPERTS if isinstance(each := getattr(told, name, None), int)), None
    )
    if not chosen or not count:
        return 1.0
    sizes = [(".experts." in f".{name}", param.numel()) for name, param in model.named_parameters()]
    routed = sum(numel for expert, numel in sizes if expert)
    return 1 - routed / sum(numel for _, numel in sizes) * (1 - chosen / count)


def _attention_flops(model: nn.Module, setting: Setting) -> float:
    """Of a model that tells its layers as those of transformers do; of others nobody knows."""
    told: Any = getattr(model, "config", None)
    if not all(isinstance(getattr(told, name, None), int) for name in ATTENTION):
        return 0.0
    return setting.attention_flops(told.num_hidden_layers, told.hidden_size)


def described(path: Path) -> nn.Module:
    """The model that the transformers configuration at ``path`` describes, on the meta device.

    Of its own architecture if it names one, else with the head of a language model. Code that lies beside the
    configuration is not run. Raises ConfigError without transformers, or for what it does not know.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "planning from a config.json needs transformers, which is not installed: install it, give the number of"
            " parameters instead (--params), or build the model and call tiering.plan_for(model=...)"
        ) from error
    if not path.exists():
        raise ConfigError(f"there is no {path}; name a transformers config.json, or the directory of one")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        named = [getattr(transformers, name, None) for name in config.architectures or ()]
        models = [
            each
            for each in named
            if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)
        ]
        with torch.device("meta"):
            if models:
                built: nn.Module = models[0](config)
            else:
                built = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # transformers and its libraries have classes of their own for this
        told = textwrap.shorten(str(error), 240, placeholder=" ...")  # or every class that there is
        raise ConfigError(
            f"{path} describes no model that transformers {transformers.__version__} can build: {told}"
        ) from error
    return built


def _measured(part: Measurement) -> Rates:
    return part.run(quietly)


def measure_rates(
    *directories: str | Path,
    workload: Workload,
    on_gpu: bool = False,
    tokens: int = TOKENS,
    io: IoConfig | None = None,
    take: Callable[[Measurement], Rates] = _measured,
) -> Rates:
    """The rates of this machine for ``workload``: of the disks behind ``directories``, the CPU, and the device.

    ``on_gpu``: its device is a GPU; those of this machine's are measured if it has one. Small micro-batches compute
    slower: the device is measured with ``tokens``, if they are few. ``io`` is how bytes travel to the disks. Takes
    about ten seconds, one GiB of disk and half a GiB of memory; ``take`` may know rates without measuring.
    """
    parts = [
        measure.of_cpu(
            state_format=workload.state_format,
            state_tensors=workload.state_tensors,
            grad_itemsize=workload.grad_itemsize,
        )
    ]
    if directories:
        parts.append(measure.of_disks([Path(each) for each in directories], io=io))
    device = device_rates.of_this_machine(on_gpu=on_gpu, compute_dtype=workload.compute_dtype, tokens=tokens)
    if device is not None:
        parts.append(device)
    rates = Rates()
    for part in parts:
        rates = rates.updated(take(part))
    return rates
