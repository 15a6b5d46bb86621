"""Stores large layers of a model as tiles of rows: ``tiering.tile``. See zero3/params/row_tiles.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tiering import _logs
from tiering._text import counted, shorten
from tiering.config.training import TieringConfig, format_size, parse_size
from tiering.errors import ConfigError
from tiering.placement.row_tiles import check_rows, rows_of_tiles
from zero3.building.quantized_linear import QuantizedLinear
from zero3.building.zero_init import forget, part_of, recipe_of
from zero3.params import resharded
from zero3.params.compilation import is_compiled
from zero3.params.grouping import READS_INSIDE
from zero3.params.inner_tensors import is_wrapper
from zero3.params.precision import COMPUTE_DTYPES, kept_in_fp32
from zero3.params.row_tiles import RowTiledEmbedding, RowTiledLinear, RowTiles, tile_modules, to_tiles

log = logging.getLogger(__name__)

Tiles = Mapping[nn.Parameter, tuple[nn.Parameter, ...]]
"""The tiles of each weight that was cut, in the order of its rows."""
IsLarge = Callable[[nn.Parameter], bool]


def tile(model: nn.Module, max_bytes: int | str, *, modules: str | Sequence[str] | None = None) -> nn.Module:
    """Cut the weights of large ``nn.Linear`` and ``nn.Embedding`` layers into tiles of rows, in place.

    A row is an output of a linear layer, or an entry of an embedding. Each tile is a parameter with at most
    ``max_bytes`` (a number, or a size such as "64MiB") in the dtype that it has now, in a module of its own, so the
    engine needs memory on the device for some tiles instead of a whole weight. Layers whose weight is not larger stay
    as they are, and larger tiles of an earlier call are cut again. Tied layers share their tiles. Checkpoints, exports,
    ``weights=`` and ``state_dict`` have the names and shapes of the whole weights, and load into models with other
    tiles or none.

    ``modules`` are names of layers, or the ends of names ("lm_head", "mlp.up_proj"). Without it, all layers are cut
    except those that read each other's weights, whose weights are quantised or have hooks, whose forward was replaced,
    or that torch.compile has compiled; a log line names the large ones among them, with the reason.

    Outputs and gradients of weights have the bits of the whole layer as far as torch's products have; the gradient of a
    linear layer's input is a sum of a part for each tile, and differs by rounding. The model may be on the meta device
    or built under ``zero.Init``. Call it after adapters are added, before the optimizer is made, which would keep the
    whole weights, and before ``initialize``.

    Returns ``model``. Raises ConfigError for a size that is too small for a row, and for a name that no layer has, or
    whose layer cannot be cut. The model is then unchanged.
    """
    try:
        most = parse_size(max_bytes)
    except ValueError as error:
        raise ConfigError(f"tile: max_bytes: {error}") from None
    wanted = None if modules is None else (modules,) if isinstance(modules, str) else tuple(modules)
    _cut(model, most, wanted, lambda weight: weight.dtype.itemsize)
    return model


def tile_as_configured(model: nn.Module, config: TieringConfig) -> Tiles:
    """Cut the layers of ``model`` whose weights are larger than ``tiering.tile`` of the configuration, if it is set.

    Returns the tiles of each weight. Bytes are those in the dtype in which the weight is computed. Raises ConfigError
    for a size that is too small for a row.
    """
    if not config.tiering.tile:
        return {}
    compute, in_fp32 = COMPUTE_DTYPES[config.precision], kept_in_fp32(model, config)

    def itemsize(weight: nn.Parameter) -> int:
        if weight in in_fp32:
            return torch.float32.itemsize
        return (compute if weight.dtype in (torch.float32, torch.float64) else weight.dtype).itemsize

    return _cut(model, config.tiering.tile, None, itemsize)


def weights_of(layer: nn.Module) -> tuple[nn.Parameter, ...]:
    """The weight of ``layer``, or its tiles; nothing if it has no parameter of this name."""
    if isinstance(layer, RowTiles):
        return layer.tile_weights
    weight = layer._parameters.get("weight")
    return () if weight is None else (weight,)


def _cut(
    model: nn.Module, most: int, names: Sequence[str] | None, itemsize: Callable[[nn.Parameter], int]
) -> Tiles:
    """Cut what is larger than ``most`` bytes, a weight or a tile of one, with ``itemsize`` bytes an element."""

    def is_large(weight: nn.Parameter) -> bool:
        return weight.numel() * itemsize(weight) > most

    layers = dict(_large(model, most, is_large) if names is None else _named(model, names, is_large))
    cut = [
        (name, weight) for name, layer in layers.items() for weight in weights_of(layer) if is_large(weight)
    ]
    for name, weight in cut:
        check_rows(name, weight.shape[1], itemsize(weight), most)
    tiles: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
    for _, weight in cut:
        if weight not in tiles:
            tiles[weight] = tuple(_tiles_of(weight, itemsize(weight), most))
    for layer in layers.values():
        to_tiles(layer, with_tiles(weights_of(layer), tiles))
    return tiles


def _large(model: nn.Module, most: int, is_large: IsLarge) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """The layers with weights that are too large and can be cut, by name."""
    kept: list[str] = []
    reasons, tiles = _reasons(model), tile_modules(model.modules())
    for name, module in model.named_modules():
        if module in tiles or not any(
            weight.dim() == 2 and is_large(weight) for weight in weights_of(module)
        ):
            continue
        if module in reasons:
            kept.append(f"{name} ({reasons[module]})")
        else:
            assert isinstance(module, nn.Linear | nn.Embedding)
            yield name, module
    if kept:
        log.log(
            _logs.once(logging.WARNING),
            "tile leaves %s with more than %s as they are: %s",
            counted(len(kept), "layer"),
            format_size(most),
            shorten(tuple(kept)),
        )


def _named(
    model: nn.Module, names: Sequence[str], is_large: IsLarge
) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """The layers of ``names`` with weights that are too large, and those that share them, by name."""
    reasons = _reasons(model)
    chosen: set[nn.Parameter] = set()
    for wanted in names:
        found = False
        for name, module in model.named_modules():
            if name != wanted and not name.endswith(f".{wanted}"):
                continue
            found = True
            # A layer that peft adapts: its base is the layer.
            layer = getattr(module, "base_layer", module)
            if layer in reasons:
                raise ConfigError(f"tile: {name!r} cannot be cut: {reasons[layer]}; leave it out of modules")
            chosen.update(filter(is_large, weights_of(layer)))
        if not found:
            raise ConfigError(f"tile: no module of the model is named {wanted!r}, or ends in it")
    tiles = tile_modules(model.modules())
    for name, module in model.named_modules():
        if module not in tiles and not chosen.isdisjoint(weights_of(module)):
            assert isinstance(module, nn.Linear | nn.Embedding)
            yield name, module


def _reasons(model: nn.Module) -> dict[nn.Module, str]:
    """The modules, except tiles, that cannot be cut, each with the reason."""
    tiles = tile_modules(model.modules())
    layers = [module for module in model.modules() if module not in tiles]
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in layers:
        tiles_of_it = weights_of(module) if isinstance(module, RowTiles) else ()
        for param in (*module._parameters.values(), *tiles_of_it):
            if param is not None:
                users.setdefault(param, []).append(module)
    alone: dict[nn.Module, str] = {}
    for module in layers:
        if isinstance(module, READS_INSIDE):
            alone |= dict.fromkeys(module.modules(), f"a {type(module).__name__} reads its weight")
        elif is_compiled(module):
            alone |= dict.fromkeys(module.modules(), "torch.compile has compiled it")
    alone |= {module: reason for module in layers if module not in alone and (reason := _reason(module))}
    reasons = dict(alone)
    for module in layers:
        sharing = (user for weight in weights_of(module) for user in users[weight] if user in alone)
        if module not in alone and (other := next(sharing, None)):
            reasons[module] = f"a {type(other).__name__}, which cannot be cut, shares its weight"
    return reasons


def _reason(layer: nn.Module) -> str | None:
    """Why ``layer`` cannot be cut by itself; None if it can."""
    weights = weights_of(layer)
    if isinstance(layer, QuantizedLinear) or any(map(is_wrapper, weights)):
        return "its weight is quantised"
    if not isinstance(layer, nn.Linear | nn.Embedding):
        return f"it is a {type(layer).__name__}, not an nn.Linear or nn.Embedding"
    if type(layer) not in (nn.Linear, nn.Embedding, RowTiledLinear, RowTiledEmbedding):
        return f"it is a {type(layer).__name__}, whose code may use the weight"
    if "forward" in vars(layer):
        return "its forward was replaced by code that may use the weight"
    if not weights:
        return "its weight is not a parameter"
    if any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights):
        return "its weight has a hook for gradients"
    if isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        return "an embedding with max_norm, sparse or scale_grad_by_freq needs all rows at once"
    if any(resharded.is_adopted(weight) and recipe_of(weight) is None for weight in weights):
        return "an engine owns its weight: cut it before tiering.initialize"
    return None


def _tiles_of(weight: nn.Parameter, itemsize: int, most: int) -> Iterator[nn.Parameter]:
    """Parameters with at most ``most`` bytes each, of ``itemsize`` an element, that hold the rows of ``weight``."""
    first, (rows_of_all, columns) = 0, weight.shape
    for rows in rows_of_tiles(rows_of_all, columns, itemsize, most):
        part = part_of(weight, first, first + rows)
        # Marks of the model's code, for example for its own param groups.
        vars(part).update(vars(weight))
        yield part
        first += rows
    if recipe_of(weight) is not None:
        # Its recipe would keep the tape, and memory that the tape has, until the weight itself is gone.
        forget([weight])
        resharded.disown([weight])


def _group_with_tiles(group: Mapping[str, Any], tiles: Tiles) -> dict[str, Any]:
    params = [group["params"]] if isinstance(group["params"], nn.Parameter) else list(group["params"])
    replaced = {**group, "params": with_tiles(params, tiles)}
    # Of an optimizer that was made with named parameters.
    if "param_names" in group:
        named = with_tiles(zip(group["param_names"], params, strict=True), tiles)
        replaced["param_names"] = [name for name, _ in named]
    return replaced


def with_tiles(listed: Iterable[Any], tiles: Tiles) -> list[Any]:
    """Parameters, named parameters or param groups ``listed`` for an optimizer, with tiles in place of the weights."""
    replaced: list[Any] = []
    for item in listed:
        if isinstance(item, Mapping):
            replaced.append(_group_with_tiles(item, tiles))
        elif isinstance(item, tuple):
            name, param = item
            parts = tiles.get(param, (param,))
            replaced += [
                (name if len(parts) == 1 else f"{name}.{number}", part) for number, part in enumerate(parts)
            ]
        else:
            replaced += tiles.get(item, (item,))
    return replaced
