"""Staging: the size of tiles, and the slots through which they pass. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiering.placement.plan import Staging
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import round_up

# One slot is read, one is updated, one is written.
FEWEST_SLOTS = 3
USUAL_SLOTS = 6
# Staging uses at most this fraction (1/n) of the host budget, if FEWEST_SLOTS allow it.
STAGING_SHARE = 3
SMALLEST_TILE = 2048
# 24 MiB of Adam's state: many requests, and the slots leave room for cached state.
LARGEST_TILE = 2 << 20
# Tiles of a group, unless the configuration needs more: each tile costs bookkeeping.
MOST_TILES = 64


def largest_tile(load: Workload) -> int:
    """The maximum of elements in a tile of ``load``."""
    if load.whole_groups:
        return max([SMALLEST_TILE, *(load.state_numel(group) for group, _ in load.alike)])
    return min(LARGEST_TILE, max(SMALLEST_TILE, load.sub_group_numel // SMALLEST_TILE * SMALLEST_TILE))


def tile_and_slots(
    load: Workload,
    room: int,
    param_tiers: Sequence[Tier],
    grad_tiers: Sequence[Tier],
) -> tuple[int, int]:
    """The elements of a tile, and the number of slots, in ``room`` bytes of host memory."""
    longest = max((load.state_numel(group) for group, _ in load.alike), default=0)
    tile = min(largest_tile(load), max(SMALLEST_TILE, longest))
    least = min(tile, round_up(max(1, -(-longest // MOST_TILES)), SMALLEST_TILE))

    streams = Streams.of(load, param_tiers, grad_tiers)

    def slot(tile: int) -> int:
        return streams.slots(tile, 1).nbytes

    while tile > least and USUAL_SLOTS * slot(tile) > room // STAGING_SHARE:
        tile = max(least, tile // 2 // SMALLEST_TILE * SMALLEST_TILE)
    fit = room // STAGING_SHARE // slot(tile) if slot(tile) else 0
    return tile, min(USUAL_SLOTS, max(FEWEST_SLOTS, fit))


def usual_room(load: Workload) -> int:
    """Host memory with which ``tile_and_slots`` has the largest tiles and the usual slots, whatever streams."""
    streams = [Tier.NVME] * len(load.groups)
    return STAGING_SHARE * Streams.of(load, streams, streams).slots(largest_tile(load), USUAL_SLOTS).nbytes


@dataclass(frozen=True)
class Streams:
    """What passes through slots: the sizes of groups, and whether the kinds stream.

    ``sized``: (elements, sizes per element, whether the group's tiles visit a GPU instead), each once.
    """

    load: Workload
    sized: Collection[tuple[int, Workload, bool]]
    state: bool
    param: bool
    grad: bool

    @classmethod
    def of(cls, load: Workload, param_tiers: Sequence[Tier], grad_tiers: Sequence[Tier]) -> Streams:
        """Those of ``load`` with its parameters and gradients on these tiers."""
        sized = {}
        for group, (state, param), _ in load.kinds.counted(load.optimizer_tiers, param_tiers):
            numel, visits = load.state_numel(group), has_to_visit(load, state, param)
            sized[numel, group.fp32, visits] = numel, load.of(group), visits
        return cls(
            load,
            sized.values(),
            Tier.NVME in load.optimizer_tiers,
            Tier.NVME in param_tiers or load.steps_copy_out,
            Tier.NVME in grad_tiers,
        )

    def slots(self, tile: int, count: int) -> Staging:
        """``count`` slots for tiles of at most ``tile`` elements, with room for the kinds that stream.

        Their size is that of the largest tile that the groups are actually divided into.
        """
        tiles = [
            (SMALLEST_TILE if visits else tile_numel(numel, tile), sizes)
            for numel, sizes, visits in self.sized
        ] or [(tile, self.load)]
        return slots_of_sizes(
            count,
            state=[n * sizes.state_itemsize for n, sizes in tiles] if self.state else [],
            param=[n * sizes.compute_itemsize for n, sizes in tiles] if self.param else [],
            grad=[n * sizes.grad_itemsize for n, sizes in tiles] if self.grad else [],
        )


def slots_of_sizes(slots: int, *, state: Sequence[int], param: Sequence[int], grad: Sequence[int]) -> Staging:
    """``slots`` with room for the largest of each kind, in bytes."""
    sizes = [max(each, default=0) for each in (state, param, grad)]
    return Staging(slots, sum(sizes), sizes[0], sizes[0] + sizes[1])


def tile_numel(numel: int, tile: int) -> int:
    """The elements of a tile if ``numel`` is divided into as few tiles of equal size, at most ``tile``, as possible."""
    count = max(1, -(-numel // tile))
    return max(SMALLEST_TILE, round_up(-(-numel // count), SMALLEST_TILE))


def has_to_visit(load: Workload, state: Tier, param: Tier) -> bool:
    """Whether parameters in host memory must visit the GPU, which keeps their state; never from NVMe or its cache."""
    in_host_memory = load.offload_param is param is Tier.HOST
    return in_host_memory and state is Tier.DEVICE and not load.device_is_host
