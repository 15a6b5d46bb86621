"""Staging: the size of tiles, and the slots through which they pass. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tiering.placement.plan import Staging
from tiering.placement.workload import Tenant, Tier, Workload
from tiering.storage.arena import round_up

# One slot is read, one is updated, one is written.
FEWEST_SLOTS = 3
USUAL_SLOTS = 6
# Before tiles become larger than usual: a late transfer keeps its slot, so a few of them may not keep most slots.
GROWN_SLOTS = 16
# More would cost more bookkeeping than they save.
MOST_SLOTS = 64
# Staging uses at most this fraction (1/n) of the host budget, if FEWEST_SLOTS allow it.
STAGING_SHARE = 3
# With less than FEW_BYTES on NVMe, memory for more than the usual slots is worth more as a cache. Otherwise slots may
# displace cached bytes until a step moves this fraction (1/n) more, of what it moves beyond FEW_BYTES.
FEW_BYTES = 4 << 30
GROWTH_SHARE = 8
SMALLEST_TILE = 2048
# 24 MiB of Adam's state: many requests, and the slots leave room for cached state.
USUAL_TILE = 2 << 20
# Tiles of a group, unless the configuration needs more: each tile costs bookkeeping.
MOST_TILES = 64


def largest_tile(load: Workload) -> int:
    """The maximum of elements in a tile of ``load`` that passes through a slot."""
    if load.whole_groups:
        return max([SMALLEST_TILE, *(load.state_numel(group) for group, _ in load.alike)])
    most = min(load.sub_group_numel, load.staged_numel)
    return max(SMALLEST_TILE, most // SMALLEST_TILE * SMALLEST_TILE)


def usual_tile(load: Workload) -> int:
    """The maximum of elements in a tile whose size no slots determine, or that passes through the usual slots."""
    return largest_tile(load) if load.whole_groups else min(USUAL_TILE, largest_tile(load))


def growth(load: Workload, room: int, everything: Sequence[Tenant]) -> int:
    """Bytes that slots may take beyond the usual ones, from ``room`` for what ``everything`` has on NVMe."""
    if not load.staged_bytes or not load.cache_in_host:
        return room
    streamed = [
        ((piece.read + piece.written) / piece.nbytes, count * piece.nbytes)
        for tenant in everything
        for piece, tier, count in tenant.counted(tenant.first_tiers)
        if tier is Tier.NVME and piece.nbytes and not piece.fixed
    ]
    # Of the last byte that is kept, which slots would displace.
    marginal, moved = 0.0, 0.0
    for traffic, nbytes in sorted(streamed, reverse=True):
        kept = min(room, nbytes)
        room -= kept
        marginal = traffic if kept else marginal
        moved += traffic * (nbytes - kept)
    return max(0, int(moved / marginal) - FEW_BYTES) // GROWTH_SHARE if marginal else 0


@dataclass(frozen=True)
class SlotRoom:
    """Room for slots for tiles of at most ``tile`` elements: at least ``fewest`` slots, and ``more`` bytes for others.

    ``most``: bytes that they never exceed, whatever streams.
    """

    load: Workload
    tile: int
    fewest: int
    more: int
    most: int

    def staging(self, param_tiers: Sequence[Tier], grad_tiers: Sequence[Tier]) -> Staging:
        """As many slots as cover the configured time of NVMe transfers, as far as there is room."""
        load, streams = self.load, Streams.of(self.load, param_tiers, grad_tiers)
        one, slots = streams.slots(self.tile, 1), 0
        if one.nbytes:
            usual = streams.slots(min(self.tile, usual_tile(load)), USUAL_SLOTS).nbytes
            goal = -(-min(load.staged_bytes, usual + self.more) // one.nbytes)
            slots = min(goal, self.most // one.nbytes, _tiles_on_nvme(load, self.tile), MOST_SLOTS)
        return replace(one, slots=max(self.fewest, slots))


def slot_room(
    load: Workload, room: int, more: int, param_tiers: Sequence[Tier], grad_tiers: Sequence[Tier]
) -> SlotRoom:
    """The room for slots in ``room`` bytes of host memory, if parameters and gradients stream from these tiers.

    ``more`` bytes may be used beyond the usual slots: for more slots, and for larger tiles if there are enough slots.
    """
    longest = max((load.state_numel(group) for group, _ in load.alike), default=0)
    largest, usual = (
        min(size, max(SMALLEST_TILE, longest)) for size in (largest_tile(load), usual_tile(load))
    )
    least = min(usual, round_up(max(1, -(-longest // MOST_TILES)), SMALLEST_TILE))
    share = room // STAGING_SHARE

    streams = Streams.of(load, param_tiers, grad_tiers)

    def bytes_of(tile: int, slots: int = USUAL_SLOTS) -> int:
        return streams.slots(tile, slots).nbytes

    goal = min(load.staged_bytes, bytes_of(usual) + more)
    tile = largest
    while tile > usual and bytes_of(tile, GROWN_SLOTS) > goal:
        tile = max(usual, _half(tile))
    while tile > least and bytes_of(tile) > share:
        tile = max(least, _half(tile))
    one = bytes_of(tile, 1)
    fewest = min(USUAL_SLOTS, max(FEWEST_SLOTS, share // one if one else 0))
    slots = SlotRoom(load, tile, fewest, more, share)
    # Nothing else may use these bytes while it is decided what streams.
    return replace(slots, most=slots.staging(param_tiers, grad_tiers).nbytes)


def _half(tile: int) -> int:
    return tile // 2 // SMALLEST_TILE * SMALLEST_TILE


def _tiles_on_nvme(load: Workload, tile: int) -> int:
    """The number of tiles of at most ``tile`` elements whose state may live on NVMe."""
    numels = (
        (load.state_numel(group), count)
        for group, (tier,), count in load.kinds.counted(load.optimizer_tiers)
        if tier is Tier.NVME
    )
    return sum(count * -(-numel // tile_numel(numel, tile)) for numel, count in numels)


def usual_room(load: Workload) -> int:
    """Host memory with room for the usual tiles and slots, whatever streams."""
    streams = [Tier.NVME] * len(load.groups)
    return STAGING_SHARE * Streams.of(load, streams, streams).slots(usual_tile(load), USUAL_SLOTS).nbytes


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
