"""plan_for: the plan of a model in memory, on the meta device, or described by a transformers configuration."""

from __future__ import annotations

import importlib
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tiering.config import ds_config
from tiering.config.training import IoConfig, TieringConfig
from tiering.errors import ConfigError, WeightsError
from tiering.host import topology
from tiering.placement.tenants import activations as activations_of
from tiering.placement.tile_sizes import Tiling
from tiering.placement.workload import ITEMSIZES, Workload
from tiering.planning import measure
from tiering.planning.activations import Activations, ActivationsOf
from tiering.planning.adapters import Adapters
from tiering.planning.choices import together
from tiering.planning.decoder import Decoder, format_count
from tiering.planning.fit import of_ranks
from tiering.planning.measure import Measurement, quietly
from tiering.planning.plan_report import PlanReport, report_on
from tiering.planning.rates import Rates
from tiering.planning.request import ModelSize, Request
from tiering.planning.setting import TOKENS, RatesOf, Setting
from tiering.planning.sizing import with_adapters
from tiering.weights.files import open_weights
from zero3.building.meta import copied_to_meta
from zero3.building.quantization import quantize, quantize_as_configured
from zero3.building.tiling import tile_as_configured, with_tiles
from zero3.building.weights import Matched, match
from zero3.building.wrapped_parameters import WrappedParameters
from zero3.observe import device_rates
from zero3.observe.throughput import ATTENTION, active_fraction
from zero3.ranks.joining import World
from zero3.setup.dry_pass import saved_bytes_of
from zero3.setup.in_place import Cuts, InPlace, find_in_place
from zero3.setup.model_size import SizedModel, size_up, sizes_of_cuts
from zero3.setup.optimizer_choice import ClientOptimizerChoice, ModelParameters, choose_optimizer
from zero3.setup.tile_advice import tiling_of

# Those of a decoder of the Llama family.
DECODER = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
)


# All parameters in one call, for scripts: the first four describe the run, the others the machine and its use.
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
    loss_chunk: int = 0,
    endurance: float | None = None,
    adapters: Adapters | None = None,
    batch: Any = None,
    elsewhere: bool = False,
) -> PlanReport:
    """Plan the placement that ``initialize`` would make; with ``rates``, also estimate the time of a step.

    ``model`` may be on the meta device, built under ``tiering.zero.Init``, or the path of a transformers configuration
    (a config.json or the directory of one). ``config``, ``model_parameters`` and ``optimizer`` are those of
    ``initialize``. ``ranks_per_node`` defaults to ``world_size``. ``gpu_memory`` is the free memory in bytes of the GPU
    of each rank; with None the CPU is the device. ``tokens`` is the number of tokens in a micro-batch of one rank, in
    sequences of ``sequence`` tokens (default: one sequence). ``checkpointed`` says that activations are checkpointed.
    ``loss_chunk`` is the number of tokens whose loss ``tiering.chunked_cross_entropy`` computes at a time, for the
    model of a configuration (0: the model computes all logits). ``endurance`` is the number of bytes that may be
    written to the drives of a node. With ``adapters``, the model of a configuration is frozen, and only adapters on its
    linear layers are trained. Frozen weights that lie beside the configuration are planned as read in place. ``batch``,
    the arguments of the forward for a micro-batch of a rank (a mapping of keywords, or a tuple), is the example with
    which the activations of a module are counted; its tensors may be on meta. Without it they are not counted, and the
    report says so. A device budget of "auto" is what counted activations leave of a GPU, otherwise half of it, as in
    ``initialize``. ``elsewhere`` says that the nodes are not this machine: "auto" budgets of host memory and NVMe are
    then what the plan needs.

    A model that does not fit is not an error: the report then says why, and suggests changes. Raises ConfigError for a
    configuration or a model that cannot be trained.
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
        loss_chunk=loss_chunk,
        endurance=endurance,
        elsewhere=elsewhere,
    )
    built = model if isinstance(model, nn.Module) else described(Path(model))
    params = sum(param.numel() for param in built.parameters())
    name = f"{type(built).__name__} of {format_count(params)} parameters"
    active = active_fraction(
        getattr(built, "config", None), ((name, param.numel()) for name, param in built.named_parameters())
    )
    size = ModelSize(name, params, active=active, attention_flops=_attention_flops(built, setting))
    if isinstance(model, nn.Module):
        if adapters is not None:
            raise ConfigError(
                "adapters are planned over the model of a config.json, but model is a module: add the adapters to the"
                " module (for example with peft), and plan it without this argument"
            )
        if settings.tiering.quantize.type != "none" or settings.tiering.tile:
            built, model_parameters = _as_configured(built, settings, model_parameters)
    else:
        adapters = Adapters.configured(adapters, settings.tiering.quantize)
        if adapters is not None:
            size = with_adapters(size, adapters, add_adapters(built, adapters))
        tile_as_configured(built, settings)
    if model_parameters is None:
        # The plan is for training, so parameters are trained even without an optimizer section.
        model_parameters = [param for param in built.parameters() if param.requires_grad]
    wrapped = WrappedParameters.split(built)
    try:
        chosen = choose_optimizer(built, settings, model_parameters, optimizer)
        stored = None if isinstance(model, nn.Module) else _weights_of(built, Path(model))

        def cut(largest: int | None) -> tuple[SizedModel, InPlace]:
            sized = size_up(
                built,
                settings,
                chosen,
                on_gpu=gpu_memory is not None,
                world_size=world_size,
                largest=largest,
            )
            return sized, find_in_place(sized, stored, settings, World(size=world_size), None)

        load = Cuts([cut(largest) for largest in sizes_of_cuts(built, settings, world_size)]).load
    finally:
        wrapped.join()
    activations = None if batch is None else _of_batch(built, settings, batch)
    if activations is None and not isinstance(model, nn.Module):
        activations = _of_decoder(built, params, settings, adapters)
    size = replace(size, activations=activations)

    @cache
    def tiling_on(ranks: int) -> Tiling:
        return tiling_of(built, settings, chosen, on_gpu=gpu_memory is not None, world_size=ranks)

    def request(config: TieringConfig, of: Setting) -> Request:
        tiling, tile = tiling_on(of.world_size), config.tiering.tile
        if (tile, of.world_size) == (settings.tiering.tile, world_size):
            own = load
        else:
            # A model that cannot be cut so stays as it is.
            own = tiling.load(tile) or of_ranks(load, of.world_size)
        own = replace(own, others=activations_of(config))
        return Request(replace(size, tiling=tiling), own, config, of.following(config))

    planned = report_on(request(settings, setting), rates or Rates())
    if not planned.fits and not planned.remedies:
        planned = replace(planned, remedies=tuple(together(request, settings, setting)))
    return planned


def _of_batch(model: nn.Module, settings: TieringConfig, batch: Any) -> ActivationsOf | None:
    """The activations of ``model`` as a forward of ``batch`` counts them; None if it cannot run."""
    saved = saved_bytes_of(model, settings, batch)
    return None if saved is None else lambda setting: Activations(None, saved, 0, 0, 0)


def _of_decoder(
    model: nn.Module, params: int, settings: TieringConfig, adapters: Adapters | None
) -> ActivationsOf | None:
    """The activations of ``model`` by the formulas of a decoder; None if it is not one that they describe."""
    shape = _decoder(model, params)
    if shape is None:
        return None
    return partial(shape.activations, itemsize=ITEMSIZES[settings.precision], adapters=adapters)


def _decoder(model: nn.Module, params: int) -> Decoder | None:
    """The decoder of the Llama family that ``model``, of transformers, is; None if its parameters are not the same."""
    config: Any = getattr(model, "config", None)
    values: list[Any] = [getattr(config, name, None) for name in DECODER]
    if not all(isinstance(value, int) for value in values):
        return None
    hidden, layers, intermediate, vocabulary, heads, key_value_heads = values
    width = (getattr(config, "head_dim", None) or hidden // heads) * key_value_heads
    shapes = (
        Decoder(hidden, layers, intermediate, vocabulary, width, attention_bias=biased)
        for biased in (False, True)
    )
    return next((shape for shape in shapes if shape.params == params), None)


def _weights_of(model: nn.Module, path: Path) -> Matched | None:
    """The weights of ``model`` beside the configuration at ``path``, if all frozen ones are there."""
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    try:
        files = open_weights(path if path.is_dir() else path.parent)
        return match(model, files, excluded=trained, encode=True)
    except WeightsError:
        return None


def _attention_flops(model: nn.Module, setting: Setting) -> float:
    """FLOPs of attention, for models with a configuration as in transformers; 0 for others, where they are unknown."""
    config: Any = getattr(model, "config", None)
    if not all(isinstance(getattr(config, name, None), int) for name in ATTENTION):
        return 0.0
    return setting.attention_flops(config.num_hidden_layers, config.hidden_size)


def described(path: Path) -> nn.Module:
    """The model that the transformers configuration at ``path`` describes, on the meta device.

    It has the architecture that the configuration names, or else the head of a language model. Code in the directory
    of the configuration is not run. Raises ConfigError if transformers is not installed or does not know the model.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "planning from a config.json needs transformers, which is not installed: install it, give the number of"
            " parameters instead (--params), or build the model and call tiering.plan_for(model=...)"
        ) from error
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name a transformers config.json, or the directory of one")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        classes = [getattr(transformers, name, None) for name in config.architectures or ()]
        models = [
            each
            for each in classes
            if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel)
        ]
        with torch.device("meta"):
            if models:
                built: nn.Module = models[0](config)
            else:
                built = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Transformers and its libraries raise many classes of errors.
    except Exception as error:
        # Some messages list every class that transformers has.
        message = textwrap.shorten(str(error), 240, placeholder=" ...")
        raise ConfigError(
            f"{path} describes no model that transformers {transformers.__version__} can build: {message}"
        ) from error
    return built


def _as_configured(
    model: nn.Module, settings: TieringConfig, model_parameters: ModelParameters | None
) -> tuple[nn.Module, ModelParameters | None]:
    """``model`` as ``initialize`` quantises and cuts it, and its ``model_parameters``: a copy on the meta device.

    Raises ConfigError for a layer that cannot be quantised or cut.
    """
    copied, copies = copied_to_meta(model)
    quantize_as_configured(copied, settings)
    if model_parameters is not None:
        model_parameters = tree_map(lambda each: copies.get(id(each), each), list(model_parameters))
    tiles = tile_as_configured(copied, settings)
    if model_parameters is not None:
        model_parameters = with_tiles(model_parameters, tiles)
    return copied, model_parameters


def add_adapters(model: nn.Module, adapters: Adapters) -> int:
    """Freeze ``model``, which is on the meta device, store its linear layers in the base format, and add ``adapters``.

    Returns the number of parameters of the adapters. Raises ConfigError if ``adapters`` name a layer that the model
    does not have, or for layers that the base format cannot store.
    """
    model.requires_grad_(False)
    if adapters.quantises:
        quantize(
            model,
            adapters.base,
            modules=adapters.quantised,
            double_quant=adapters.double_quant,
            block_size=adapters.block_size,
        )
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    adapted = {
        name: module
        for name, module in model.named_modules()
        if _shape_of(module) is not None and adapters.adapts(name, is_head=module is head)
    }
    adapters.check_found(set(adapted))
    trained = 0
    for name, layer in adapted.items():
        shape = _shape_of(layer)
        assert shape is not None
        matrices = adapters.matrices(*shape)
        around, _, short = name.rpartition(".")
        setattr(model.get_submodule(around), short, _AdaptedLayer(layer, matrices))
        trained += sum(map(math.prod, matrices))
    return trained


class _AdaptedLayer(nn.Module):
    """A linear layer with an adapter, whose matrices have these shapes, in the modules that peft has for them.

    The modules matter: each layer below is cut into tiles by itself, and may then be a group.
    """

    def __init__(self, layer: nn.Module, matrices: tuple[tuple[int, int], tuple[int, int]]) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(columns, rows, bias=False, device="meta")})
            for rows, columns in matrices
        )


def _shape_of(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer; None for another module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    # The linear layer of transformers' GPT-2, whose weight has the inputs first.
    if type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight.shape[0], weight.shape[1]
    return None


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
    """Measure the rates of this machine for ``workload``: the disks behind ``directories``, the CPU, and the device.

    With ``on_gpu`` the device is a GPU; it is measured if this machine has one. Small micro-batches compute slower, so
    the device is measured with at most ``tokens``. ``io`` configures the I/O to the disks. The measurement takes about
    ten seconds, one GiB of disk and half a GiB of memory; ``take`` may return saved rates instead.
    """
    topology.settle(0, 1, nvme=bool(directories))
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
