"""Checks whether the engine supports a model, before anything is planned or moved."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from tiering import _logs
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.building.weights import STORED_NAMES
from zero3.building.wrapped_parameters import check_wrapped
from zero3.building.zero_init import recipe_of
from zero3.params import resharded
from zero3.params.compilation import is_wrapped
from zero3.params.precision import COMPUTE_DTYPES, is_packed, keeps_dtype, kept_in_fp32, unmatched
from zero3.params.row_tiles import tiled_weights

log = logging.getLogger(__name__)


def check_model(model: nn.Module) -> None:
    """Raise ConfigError or EngineStateError for a model that another engine, wrapper or library uses."""
    _check_unowned(model)
    if is_wrapped(model):
        raise ConfigError(
            "the model is wrapped by torch.compile, which does not see that parameters are unsharded and resharded;"
            " initialize the original model, and compile its blocks: `for block in model.layers: block.compile()`"
        )
    for name, module in model.named_modules():
        _check_module(f"module {name!r}" if name else "the model", module)
    for name, param in model.named_parameters():
        _check_tensor(name, param)
    for weight in tiled_weights(model.named_modules()):
        if len({tile.requires_grad for tile in weight.layer.tile_weights}) > 1:
            raise ConfigError(
                f"some tiles of {weight.name!r} are frozen and others trained, but a checkpoint has the weight as one"
                " tensor: freeze all of them with requires_grad_(False) of the layer, or none"
            )
    check_wrapped(model)


def check_dtypes(model: nn.Module, config: TieringConfig) -> None:
    """Raise ConfigError for parameters that can be neither cast to the compute dtype nor kept; log casts that round.

    Parameters that keep their dtype need one that a checkpoint can name.
    """
    compute = COMPUTE_DTYPES[config.precision]
    for pattern in unmatched(model, config):
        log.log(
            _logs.once(logging.WARNING), "tiering.keep_fp32: no parameter of the model matches %r", pattern
        )
    in_fp32 = kept_in_fp32(model, config)
    changed: dict[torch.dtype, list[str]] = {}
    for name, param in model.named_parameters():
        if keeps_dtype(param):
            _check_kept(name, param)
            continue
        _check_trained(name, param)
        # The cast of an fp32 model to 16 bits is what the configuration requests.
        if param.dtype not in (compute, torch.float32) and param not in in_fp32:
            changed.setdefault(param.dtype, []).append(name)
    for dtype, names in changed.items():
        level = logging.INFO if compute is torch.float32 and dtype.itemsize == 2 else logging.WARNING
        log.log(_logs.once(level), "%s", _cast_message(dtype, compute, names))


def check_dense_gradients(model: nn.Module, trained: Container[Tensor]) -> None:
    """Raise ConfigError if one of the ``trained`` parameters is an embedding with sparse gradients."""
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight in trained:
            raise ConfigError(
                f"module {name!r} has sparse=True, which gives {name + '.weight'!r} sparse gradients, and only dense"
                f" ones can be tiered: build it with sparse=False, or set model.{name}.sparse = False"
            )


def _check_unowned(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if not resharded.is_adopted(param) or recipe_of(param) is not None:
            continue
        if resharded.owner_of(param) is None:
            raise EngineStateError(
                f"{name!r} belonged to an engine that was closed, which drops the values: build the model again and"
                " load the result of engine.state_dict(), or end the engine with release() instead of close()"
            )
        raise EngineStateError(
            f"{name!r} belongs to an open engine: train with that engine, or end it with release(), which"
            " returns the parameters with their values"
        )


def _check_module(title: str, module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel | DataParallel):
        raise ConfigError(
            f"{title} is wrapped in {type(module).__name__}, which averages gradients, and so does the engine:"
            " initialize the wrapped model (its attribute .module)"
        )
    if is_subclass_by_name(type(module), ("FSDPModule", "FullyShardedDataParallel")):
        raise ConfigError(
            f"{title} is sharded by FSDP, and the engine shards parameters itself: initialize the model as it was"
            " built, without fully_shard() or FullyShardedDataParallel"
        )
    # Traced modules accept hooks.
    if is_subclass_by_name(type(module), ("RecursiveScriptModule",)):
        raise ConfigError(
            f"{title} was made by torch.jit.script, whose modules accept none of the hooks that unshard parameters:"
            " initialize the original Python module, and compile blocks with block.compile() instead"
        )


def _check_tensor(name: str, param: nn.Parameter) -> None:
    if is_lazy(param):
        raise ConfigError(
            f"parameter {name!r} of a lazy module has no shape yet: run one batch through the model under"
            " torch.no_grad() before initialize"
        )
    kind = type(param)
    if is_subclass_by_name(kind, ("DTensor",)):
        raise ConfigError(
            f"parameter {name!r} is a DTensor, sharded by parallelize_module, distribute_tensor or fully_shard. The"
            " engine shards ordinary parameters over all ranks itself: initialize the model without those calls"
        )
    if param.layout is not torch.strided:
        raise ConfigError(f"parameter {name!r} is {param.layout}; only dense parameters can be tiered")


def is_subclass_by_name(kind: type, names: Iterable[str]) -> bool:
    """Whether a base of ``kind`` is a class of torch with one of ``names``. An import of the classes would be slow."""
    return any(base.__name__ in names and base.__module__.startswith("torch.") for base in kind.__mro__)


def _check_kept(name: str, param: nn.Parameter) -> None:
    if param.dtype not in STORED_NAMES:
        raise ConfigError(
            f"parameter {name!r} is {param.dtype}, which no checkpoint can hold, because safetensors has no such dtype:"
            " store it as a view in another dtype (torch.view_as_real for complex numbers, .view(torch.uint8) for"
            " packed ones), or register it as a buffer with persistent=False"
        )


def _check_trained(name: str, param: nn.Parameter) -> None:
    if is_packed(param):
        raise ConfigError(
            f"parameter {name!r} holds the packed bytes of a quantised weight and requires a gradient, which would"
            " change them as if they were numbers: freeze it with requires_grad_(False), and train an adapter"
        )
    if not param.is_floating_point():
        raise ConfigError(
            f"parameter {name!r} is {param.dtype} and requires a gradient, and only floating-point parameters can be"
            " trained: freeze it with requires_grad_(False), or store it as torch.view_as_real"
        )


def _cast_message(dtype: torch.dtype, compute: torch.dtype, names: list[str]) -> str:
    more = f" and {len(names) - 1} other parameters" if len(names) > 1 else ""
    are = "are" if more else "is"
    if dtype.itemsize < compute.itemsize:
        effect = f"takes {compute.itemsize // dtype.itemsize} times the memory"
    else:
        effect = "rounds them" if dtype.itemsize > compute.itemsize else "rounds them, or changes their range"
    return f"{names[0]!r}{more} {are} {dtype} and will be cast to the compute dtype {compute}, which {effect}"
