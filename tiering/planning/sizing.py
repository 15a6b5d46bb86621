"""Plans of a decoder of a given size or name, without a model."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from tiering.config.training import TieringConfig
from tiering.placement.configured import configured_state, largest_group, make_workload
from tiering.placement.row_tiles import check_rows
from tiering.placement.tenants import activations
from tiering.placement.tile_sizes import Tiling
from tiering.placement.workload import ITEMSIZES, Workload
from tiering.planning.adapters import Adapters
from tiering.planning.choices import NOTHING, Open, assumptions, choose, together
from tiering.planning.decoder import EMBEDDING, Decoder, decoder, format_count
from tiering.planning.decoder_groups import form_groups
from tiering.planning.plan_report import PlanReport, report_on
from tiering.planning.request import ModelSize, Request
from tiering.planning.setting import RatesOf, Setting, with_changes

# More tiles would take longer to plan than a command may.
MOST_TILES = 25_000


def plan_of_size(
    params: int,
    config: TieringConfig,
    setting: Setting,
    rates: RatesOf,
    adapters: Adapters | None = None,
    open_: Open = NOTHING,
) -> PlanReport:
    """The plan of the decoder of about ``params`` parameters.

    Raises ConfigError if there is no such decoder, or the configuration does not support it.
    """
    shape = decoder(params)
    return plan_of_decoder(str(shape), shape, config, setting, rates, adapters, open_)


def plan_of_decoder(
    name: str,
    shape: Decoder,
    config: TieringConfig,
    setting: Setting,
    rates: RatesOf,
    adapters: Adapters | None = None,
    open_: Open = NOTHING,
) -> PlanReport:
    """The plan of ``shape``, with ``adapters`` over it if they are given; the report calls it ``name``.

    What is ``open_`` is chosen so that there is a plan. Raises ConfigError if the configuration does not support it.
    """
    adapters = Adapters.configured(adapters, config.tiering.quantize)
    setting = setting.following(config)
    attention = setting.attention_flops(shape.layers, shape.hidden)
    activations_of = partial(shape.activations, itemsize=ITEMSIZES[config.precision], adapters=adapters)
    size = ModelSize(name, shape.params, attention_flops=attention, activations=activations_of)
    if adapters is not None:
        size = with_adapters(size, adapters, shape.trained_params(adapters))

    def request(config: TieringConfig, setting: Setting) -> Request:
        def tiled(tile: int) -> Workload:
            return load_of(shape, with_changes(config, tiers={"tile": tile}), setting, adapters)

        itemsize = ITEMSIZES[config.precision]
        layer = max(weight.numel for weight in shape.linear_layers) * itemsize
        largest = min(layer, config.tiering.tile or layer)
        tiling = Tiling(largest, shape.params * itemsize, tiled, MOST_TILES)
        load = load_of(shape, config, setting, adapters)
        return Request(replace(size, tiling=tiling), load, config, setting)

    chosen = choose(request, config, setting, open_)
    report = report_on(chosen, rates)
    if not report.fits and not report.remedies:
        report = replace(report, remedies=tuple(together(request, chosen.config, chosen.setting)))
    return replace(report, assumptions=assumptions(chosen, config, setting))


def with_adapters(size: ModelSize, adapters: Adapters, trained: int) -> ModelSize:
    """``size``, of the frozen model alone, with the ``trained`` parameters of ``adapters``."""
    params = size.params + trained
    return replace(
        size,
        name=f"{size.name}, with {adapters} ({format_count(trained)} trained)",
        params=params,
        computed=params,
    )


def load_of(
    shape: Decoder, config: TieringConfig, setting: Setting, adapters: Adapters | None = None
) -> Workload:
    """The engine's Workload for ``shape``, if torch can compute in the memory that reads land in.

    Raises ConfigError if ``adapters`` name a layer that the decoder does not have, or if a row of a layer is larger
    than a tile.
    """
    if adapters is not None:
        adapters.check_found({each.module for each in shape.linear_layers})
    itemsize = ITEMSIZES[config.precision]
    if config.tiering.tile:
        for weight in (*shape.modules()[EMBEDDING], *shape.block()):
            is_whole = adapters is not None and weight.is_stored_as_base(adapters)
            if len(weight.shape) == 2 and not is_whole:
                check_rows(weight.layer, weight.shape[1], itemsize, config.tiering.tile)
    on_gpu = setting.gpu_memory is not None
    groups = partial(
        form_groups,
        shape,
        persistence_threshold=config.zero.persistence_threshold,
        itemsize=itemsize,
        world_size=setting.world_size,
        adapters=adapters,
        tile=config.tiering.tile,
    )
    first, finest = groups(largest=largest_group(config, setting.world_size)), groups(largest=0)
    load = make_workload(
        config,
        first,
        configured_state(config),
        on_gpu=on_gpu,
        world_size=setting.world_size,
        fetch_by_copy=on_gpu,
        others=activations(config),
        finer=[finest] if config.tiering.block_rows is None and finest != first else (),
    )
    return _first_equal(load)


@lru_cache(maxsize=16)
def _first_equal(load: Workload) -> Workload:
    """The first of equal Workloads, which has computed the properties of its groups already."""
    return load
