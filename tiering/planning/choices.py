"""What the planner chooses where a command leaves it open: checkpointing, the place of activations, and tiles.

Only a choice without which there is no plan is made, in this order. Each is an assumption that the report prints.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tiering.config.fields import format_size
from tiering.config.training import TieringConfig
from tiering.placement.placement import place
from tiering.placement.tile_sizes import ample_but_device
from tiering.placement.workload import Tier
from tiering.planning.fit import MOST_RANKS, Remedy, changed_budgets
from tiering.planning.request import Request
from tiering.planning.setting import Setting, with_changes


@dataclass(frozen=True)
class Open:
    """What a command leaves open."""

    checkpointing: bool = False
    activations: bool = False
    tile: bool = False

    def ways(self, config: TieringConfig, setting: Setting) -> Iterator[tuple[TieringConfig, Setting]]:
        """``config`` and ``setting``, then with more and more choices, but for tiles."""
        yield config, setting
        if self.checkpointing and not setting.checkpointed:
            setting = replace(setting, checkpointed=True)
            yield config, setting
        if self.activations and config.tiering.activations == "device":
            yield with_changes(config, tiers={"activations": "auto"}), setting


NOTHING = Open()
EVERYTHING = Open(checkpointing=True, activations=True, tile=True)
# Bytes of a GPU: a remedy does not name more.
LARGEST_GPU = 1 << 40


def choose(
    request_of: Callable[[TieringConfig, Setting], Request],
    config: TieringConfig,
    setting: Setting,
    open_: Open,
) -> Request:
    """The request with the fewest choices with which the device has enough memory; if it never has, that with most.

    Of the tiles, which cannot help then, it has none.
    """
    for way in open_.ways(config, setting):
        request = request_of(*way)
        if _is_device_enough(request):
            return request
        tiling = request.model.tiling
        if open_.tile and tiling is not None and request.has_room_for_activations:
            for tile in tiling.sizes(request.load, request.budgets_without_activations):
                tiled = request_of(with_changes(request.config, tiers={"tile": tile}), request.setting)
                if _is_device_enough(tiled):
                    return tiled
    return request


def _is_device_enough(request: Request) -> bool:
    """Whether there is a plan, with any budgets of the slower tiers."""
    if request.fits:
        return True
    budgets = request.budgets_without_activations
    more = changed_budgets(budgets, ample_but_device(request.load, budgets), request.setting.local_size)
    return bool(more) and request.changed(more).fits


def assumptions(chosen: Request, config: TieringConfig, setting: Setting) -> tuple[str, ...]:
    """Sentences on what ``chosen`` has besides ``config`` and ``setting``."""
    made = []
    if chosen.setting.checkpointed and not setting.checkpointed:
        made.append(
            "Assumed: activation checkpointing, which your model has to enable; --no-checkpointing plans without it."
        )
    if chosen.config.tiering.activations != config.tiering.activations:
        made.append(
            f"Assumed: tiering.activations {chosen.config.tiering.activations!r}, because the GPU has no room for them;"
            " --activations device plans without it."
        )
    if chosen.config.tiering.tile != config.tiering.tile:
        made.append(
            f"Assumed: tiering.tile {format_size(chosen.config.tiering.tile)}, because the largest layer does not fit"
            " on the device; --tile 0 plans without it."
        )
    return tuple(made)


def together(
    request_of: Callable[[TieringConfig, Setting], Request], config: TieringConfig, setting: Setting
) -> Iterator[Remedy]:
    """What makes the model fit on GPUs if no single change does: all choices, with the budgets that they need; then,
    with the budgets that there are, more ranks.
    """
    if setting.gpu_memory is None:
        return
    automatic = with_changes(config, tiers={f"{tier.value}_budget": "auto" for tier in Tier})
    gpus = [*_gpu_sizes(setting.gpu_memory)]

    def fits_with_all(gpu: int) -> bool:
        *_, last = EVERYTHING.ways(automatic, replace(setting, gpu_memory=gpu, elsewhere=True))
        return choose(request_of, *last, Open(tile=True)).fits

    at = 0 if fits_with_all(gpus[0]) else bisect_left(gpus, True, lo=1, key=fits_with_all)
    if at == len(gpus):
        return
    chosen = choose(request_of, automatic, replace(setting, gpu_memory=gpus[at], elsewhere=True), EVERYTHING)
    change = _choices(chosen, config, setting)
    with_choices = request_of(config, setting).changed(change, chosen.load)
    enough = chosen.plan(place)[0].budgets
    raised = {
        f"tiering.{tier.value}_budget": enough.of(tier) * setting.local_size
        for tier in Tier
        if enough.of(tier) > with_choices.budgets.of(tier)
    }
    if with_choices.changed(raised).fits:
        yield Remedy({**change, **raised}, chosen.load, enough)
    # More ranks need no less of a device.
    if not raised.keys() <= {"tiering.device_budget"}:
        yield from _on_more_ranks(request_of, config, setting, with_choices.setting)


def _gpu_sizes(first: int) -> Iterator[int]:
    """``first``, and larger sizes up to LARGEST_GPU: powers of two times it, and three between each two of these."""
    size = first
    while size <= LARGEST_GPU:
        yield from (size * quarters // 4 for quarters in range(4, 8))
        size *= 2


def _on_more_ranks(
    request_of: Callable[[TieringConfig, Setting], Request],
    config: TieringConfig,
    setting: Setting,
    chosen: Setting,
) -> Iterator[Remedy]:
    """The least power of two times as many ranks on which the model fits with the budgets of ``config``, as ``chosen``.

    It has the choices that most ranks need.
    """
    counts = [setting.world_size << doubling for doubling in range(1, MOST_RANKS.bit_length())]
    counts = [count for count in counts if count <= MOST_RANKS]
    if not counts:
        return
    most = choose(request_of, config, replace(chosen, world_size=counts[-1]), EVERYTHING)

    def on(ranks: int) -> Request:
        return request_of(most.config, replace(most.setting, world_size=ranks))

    least = bisect_left(counts, True, key=lambda ranks: on(ranks).fits)
    if least < len(counts):
        request = on(counts[least])
        change = _choices(request, config, setting)
        yield Remedy({**change, "ranks": counts[least]}, request.load, request.budgets)


def _choices(chosen: Request, config: TieringConfig, setting: Setting) -> dict[str, int | str]:
    """What ``chosen`` has besides ``config`` and ``setting``, as a change."""
    tiers, change = chosen.config.tiering, dict[str, int | str]()
    if chosen.setting.gpu_memory is not None and chosen.setting.gpu_memory != setting.gpu_memory:
        change["gpu"] = chosen.setting.gpu_memory
    if chosen.setting.checkpointed and not setting.checkpointed:
        change["checkpointing"] = True
    if tiers.activations != config.tiering.activations:
        change["tiering.activations"] = tiers.activations
    if tiers.tile != config.tiering.tile:
        change["tiering.tile"] = tiers.tile
    return change
