"""Fills the host budget with what would otherwise live on NVMe: the most traffic per byte first. Pure.

At equal traffic, what is written comes before what is only read, because writes wear a drive. So training adapters with
room for them writes nothing to NVMe, although their frozen model is read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiering.placement.plan import Staging, SubGroup
from tiering.placement.slots import grad_window, has_to_visit, largest_tile, slots_for, tile_numel
from tiering.placement.workload import Tier, Workload


@dataclass(frozen=True)
class Filled:
    """The use of the host budget. Tiers are in the order of the groups."""

    params: list[Tier]
    grads: list[Tier]
    tiles: list[SubGroup]
    staging: Staging


class HostFilling:
    """The tiers of ``load`` while ``room`` bytes of host memory are filled.

    Parameters and gradients start on ``param_tiers`` and ``grad_tiers``. State passes through ``slots`` slots for tiles
    of ``tile`` elements; without slots, everything has to fit. ``room`` does not include the slots and the gradient
    window, but their bytes are used too if they are not needed.
    """

    def __init__(
        self,
        load: Workload,
        room: int,
        param_tiers: Sequence[Tier],
        grad_tiers: Sequence[Tier],
        tile: int,
        slots: int | None,
    ) -> None:
        self._load = load
        self._room = room
        self._first_tiers = (param_tiers, grad_tiers)
        self._params, self._grads = list(param_tiers), list(grad_tiers)
        self._tiles: list[SubGroup] = []
        self._tile, self._slots = tile, slots
        self._fits = True

    def run(self) -> Filled | None:
        """Fill the room. Returns None if there are no slots, and something does not fit."""
        load = self._load
        # (traffic per byte, bytes of it that are written), and what keeps these bytes in host memory.
        offers: list[tuple[tuple[float, float], Callable[[], None]]] = []
        for index, group in enumerate(load.groups):
            read, written = load.param_traffic(group)
            nbytes = max(load.home_bytes(group), 1)
            offers.append((((read + written) / nbytes, written / nbytes), partial(self._keep_params, index)))
        grads = [load.groups[index] for index in self._waiting]
        moved = sum(map(load.grad_traffic, grads)) / max(sum(map(load.home_grad_bytes, grads)), 1)
        offers.append(((2 * moved, moved), self._keep_gradients))
        # A step reads and writes each byte of state once.
        offers.append(((2.0, 1.0), self._keep_state))
        for _, keep in sorted(offers, key=lambda offer: offer[0], reverse=True):
            keep()
        if self._slots is None:
            return Filled(self._params, self._grads, self._tiles, Staging()) if self._fits else None
        return Filled(self._params, self._grads, self._tiles, self._staging(self._params, self._grads))

    @property
    def _waiting(self) -> list[int]:
        """Groups whose gradients stream. Those without planned traffic keep their extent, for gradients that are not
        final in time.
        """
        load, tiers = self._load, self._first_tiers[1]
        streamed = [index for index, tier in enumerate(tiers) if tier is Tier.NVME]
        return [i for i in streamed if self._slots is None or load.grad_traffic(load.groups[i])]

    def _keep(self, nbytes: int, *, offloaded: bool = True) -> bool:
        """Take ``nbytes`` of the room, if there are as many. ``cache_in_host`` false keeps out what is ``offloaded``.

        Gradients are not offloaded, they are only spilled.
        """
        # SGD in fp32 has no state to move.
        if not nbytes:
            return True
        if nbytes <= self._room and (self._load.cache_in_host or not offloaded):
            self._room -= nbytes
            return True
        self._fits = False
        return False

    def _keep_params(self, index: int) -> None:
        nbytes = self._load.home_bytes(self._load.groups[index])
        if self._params[index] is Tier.NVME and self._keep(nbytes):
            self._params[index] = Tier.HOST

    def _keep_gradients(self) -> None:
        """All groups together: their window is free for other bytes only if no gradient streams through it."""
        load, tiers, waiting = self._load, self._first_tiers[1], self._waiting
        sizes = {index: load.home_grad_bytes(load.groups[index]) for index in waiting}
        all_wait = len(waiting) == tiers.count(Tier.NVME)
        window = grad_window(load, tiers) if self._slots is not None and all_wait else 0
        if sum(sizes.values()) <= self._room + window:
            self._room += window
        for index, nbytes in sizes.items():
            if self._keep(nbytes, offloaded=False):
                self._grads[index] = Tier.HOST

    def _keep_state(self) -> None:
        if self._slots is not None:
            unneeded = (
                self._staging(*self._first_tiers).nbytes - self._staging(self._params, self._grads).nbytes
            )
            self._room += unneeded
        load = self._load
        for index, (group, home) in enumerate(zip(load.groups, load.optimizer_tiers, strict=True)):
            numel = load.state_numel(group)
            # Tiles that visit the device need no host slots, so the room for host slots must not limit their size.
            visits = has_to_visit(load, home, self._params[index])
            step = tile_numel(numel, largest_tile(load) if visits else self._tile)
            for start in range(0, numel, step):
                end = min(start + step, numel)
                tier = home
                if tier is Tier.NVME and self._keep((end - start) * load.of(group).state_itemsize):
                    tier = Tier.HOST
                self._tiles.append(SubGroup(index, start, end, tier))

    def _staging(self, params: Sequence[Tier], grads: Sequence[Tier]) -> Staging:
        assert self._slots is not None
        return slots_for(self._load, self._tile, self._slots, params, grads)
