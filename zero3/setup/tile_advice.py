"""A module in tiles, for the advice of a plan and of a refusal: the tiles with which it would fit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from torch import nn

from tiering.config.training import TieringConfig, format_size
from tiering.errors import PlacementError
from tiering.placement.budgets import fits
from tiering.placement.plan import Budgets
from tiering.placement.tile_sizes import Tiling
from tiering.placement.workload import ITEMSIZES, Workload
from zero3.building.meta import copied_to_meta
from zero3.building.tiling import tile_as_configured, weights_of, with_tiles
from zero3.params.row_tiles import RowTiles
from zero3.setup.model_size import size_up, sizes_of_cuts
from zero3.setup.optimizer_choice import OptimizerChoice

log = logging.getLogger(__name__)

MOST_TILES = 2_000
"""More would take longer to plan than a refusal may."""


def advise_tiles(refusal: PlacementError, load: Workload, tiling: Tiling, budgets: Budgets) -> PlacementError:
    """``refusal`` of ``load``, with the largest ``tiering.tile``, a power of two, that makes the model fit ``budgets``.

    Without advice if no size does.
    """
    for size in tiling.sizes(load, budgets):
        tiled = tiling.load(size)
        if tiled is None:
            break
        if fits(tiled, budgets):
            return PlacementError(
                f"{refusal.message}. With tiering.tile of {format_size(size)} the model fits: large layers are then cut"
                " into tiles of rows"
            )
    return refusal


def tiling_of(
    model: nn.Module, config: TieringConfig, chosen: OptimizerChoice, *, on_gpu: bool, world_size: int
) -> Tiling:
    """``model``, which may be cut into tiles already, in tiles that are smaller."""

    # A search for changes asks for the same tiles with many budgets.
    @cache
    def load(size: int) -> Workload | None:
        smaller = config.model_copy(update={"tiering": config.tiering.model_copy(update={"tile": size})})
        try:
            first, *finer = _loads(model, smaller, chosen, on_gpu=on_gpu, world_size=world_size)
        # A row of a layer is larger than such a tile; or the model cannot be copied, which may raise anything.
        except Exception as error:
            log.debug("no tiles are advised: %r", error)
            return None
        return replace(first, finer=tuple(each.groups for each in finer))

    layers = (
        module
        for module in model.modules()
        if isinstance(module, RowTiles) or type(module) in (nn.Linear, nn.Embedding)
    )
    numels = (weight.numel() for layer in layers for weight in weights_of(layer))
    itemsize = ITEMSIZES[config.precision]
    largest = max(numels, default=0) * itemsize
    # Smaller than what was refused.
    largest = min(largest, config.tiering.tile or largest)
    return Tiling(largest, sum(param.numel() for param in model.parameters()) * itemsize, load, MOST_TILES)


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
