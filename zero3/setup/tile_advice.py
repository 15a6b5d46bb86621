"""The size of tiles with which a model fits that was refused: what the error advises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from tiering.config.training import TieringConfig, format_size
from tiering.errors import PlacementError
from tiering.placement.budgets import fits
from tiering.placement.placement import AMPLE
from tiering.placement.plan import Budgets
from tiering.placement.workload import ITEMSIZES, Workload
from zero3.building.meta import copied_to_meta
from zero3.building.tiling import tile_as_configured, weights_of, with_tiles
from zero3.params.row_tiles import RowTiles
from zero3.setup.model_size import size_up, sizes_of_cuts
from zero3.setup.optimizer_choice import OptimizerChoice

log = logging.getLogger(__name__)

SMALLEST = 4 << 10
"""Bytes: smaller tiles are not tried."""
MOST_TILES = 10_000
"""More would take longer to plan than a refusal may."""


def advise_tiles(
    refusal: PlacementError,
    load: Workload,
    model: nn.Module,
    config: TieringConfig,
    chosen: OptimizerChoice,
    budgets: Budgets,
    *,
    on_gpu: bool,
    world_size: int,
) -> PlacementError:
    """``refusal`` of ``load``, with the largest ``tiering.tile``, a power of two, that makes ``model`` fit ``budgets``.

    Without advice if no size does, or if more room on the device would not help either.
    """
    if not fits(load, replace(budgets, device=AMPLE)):
        return refusal
    for size in _sizes(model, config):
        smaller = config.model_copy(update={"tiering": config.tiering.model_copy(update={"tile": size})})
        try:
            loads = _loads(model, smaller, chosen, on_gpu=on_gpu, world_size=world_size)
            if any(fits(load, budgets) for load in loads):
                return PlacementError(
                    f"{refusal.message}. With tiering.tile of {format_size(size)} the model fits: large layers are then"
                    " cut into tiles of rows"
                )
        # A row of a layer is larger than such a tile; or the model cannot be copied, which may raise anything.
        except Exception as error:
            log.debug("no tiles are advised: %r", error)
            break
    return refusal


def _sizes(model: nn.Module, config: TieringConfig) -> Iterator[int]:
    """Powers of two below the bytes of the largest layer or tile, descending, that give at most MOST_TILES tiles."""
    layers = (
        module
        for module in model.modules()
        if isinstance(module, RowTiles) or type(module) in (nn.Linear, nn.Embedding)
    )
    numels = (weight.numel() for layer in layers for weight in weights_of(layer))
    itemsize = ITEMSIZES[config.precision]
    largest = max(numels, default=0) * itemsize
    everything = sum(param.numel() for param in model.parameters()) * itemsize
    # Smaller than what was refused.
    size = SMALLEST
    while 2 * size < min(largest, config.tiering.tile or largest):
        size *= 2
    while size >= max(SMALLEST, everything // MOST_TILES):
        yield size
        size //= 2


def _loads(
    model: nn.Module, config: TieringConfig, chosen: OptimizerChoice, *, on_gpu: bool, world_size: int
) -> Iterator[Workload]:
    """What a copy of ``model`` on the meta device needs, in tiles, by each cut into groups."""
    copied, copies = copied_to_meta(model)
    tiles = tile_as_configured(copied, config)
    groups = [
        {**group, "params": with_tiles((copies[id(param)] for param in group["params"]), tiles)}
        for group in chosen.param_groups
    ]
    trained = replace(chosen, param_groups=groups, client=None)
    for largest in sizes_of_cuts(copied, config, world_size):
        yield size_up(copied, config, trained, on_gpu=on_gpu, world_size=world_size, largest=largest).workload
