"""What the planner chooses where a command leaves it open: checkpointing, the place of activations, and tiles.

Only a choice without which there is no plan is made, in this order. Each is an assumption that the report prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tiering.config.fields import format_size
from tiering.config.training import TieringConfig
from tiering.placement.placement import AMPLE
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier
from tiering.planning.fit import UNLIMITED, fits
from tiering.planning.request import Request
from tiering.planning.setting import Setting, with_changes

# Of a layer in tiles, a device holds one that computes and the next one, gradients of both in send buffers, and up to
# three gradients in torch.
TILES_AT_ONCE = 8
SMALLEST_TILE = 1 << 20
# Of tiles, each half as large as the one before: there are twice as many then, which takes twice as long to plan.
MOST_SIZES = 3
# Tiles of a model: a plan that counted more would take longer than a refusal may.
MOST_TILES = 100_000


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
        if open_.tile and request.has_room_for_activations:
            for tile in tiles_to_try(request):
                tiled = request_of(with_changes(request.config, tiers={"tile": tile}), request.setting)
                if _is_device_enough(tiled):
                    return tiled
    return request


def _is_device_enough(request: Request) -> bool:
    """Whether there is a plan, with any budgets of the other tiers."""
    ample = {
        f"tiering.{tier.value}_budget": AMPLE * request.setting.local_size for tier in (Tier.HOST, Tier.NVME)
    }
    return request.fits() or request.changed(ample).fits()


def tiles_to_try(request: Request) -> Iterator[int]:
    """Sizes of tiles for ``request``, which has no plan, the largest first; none if the device is not too small."""
    budgets = request.budgets_without_activations
    room = _room(request, budgets)
    tile = 1 << (max(room, 1) // TILES_AT_ONCE).bit_length() - 1 if room >= TILES_AT_ONCE else 0
    largest = max((group.largest_trained for group in request.load.groups), default=0)
    if tile >= largest * request.load.compute_itemsize:
        return
    if fits(request.load, replace(budgets, host=UNLIMITED, nvme=UNLIMITED)):
        return
    model = sum(count * group.param_bytes for group, count in request.load.alike)
    for _ in range(MOST_SIZES):
        if tile >= max(SMALLEST_TILE, model // MOST_TILES):
            yield tile
        tile //= 2


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


def _room(request: Request, budgets: Budgets) -> int:
    """Device memory of the engine and of gradients in torch together, beside the least activations."""
    gpu, sizes = request.setting.gpu_memory, request.sizes
    if gpu is None or sizes is None or not request.limits_device:
        return budgets.device
    return gpu - sizes.on_device(sizes.saved)
