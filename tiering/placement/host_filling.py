"""Fills the host budget with what would otherwise live on NVMe: the most traffic per byte first. Pure.

At equal traffic, what is written comes before what is only read, because writes wear a drive. So training adapters with
room for them writes nothing to NVMe, although their frozen model is read from it. Experts come last: their traffic is
that of a pass which routes tokens to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tiering.placement.plan import Staging, TileRun
from tiering.placement.slots import has_to_visit, largest_tile, slots_for, tile_numel
from tiering.placement.tenants import GRADIENTS, OPTIMIZER_STATE, PARAMETERS
from tiering.placement.workload import Tenant, TenantPiece, Tier, Workload


@dataclass(frozen=True)
class Filled:
    """The use of the host budget: the tiers of each tenant's pieces, by its kind; optimizer state is in ``runs``."""

    tiers: Mapping[str, list[Tier]]
    runs: list[TileRun]
    staging: Staging


class HostFilling:
    """The tiers of ``everything`` in ``load`` while ``room`` bytes of host memory are filled.

    The pieces of a tenant start on ``first_tiers``, by its kind. State passes through ``slots`` slots for tiles of
    ``tile`` elements; without slots, everything has to fit. ``room`` does not include the slots and the windows, but
    their bytes are used too if they are not needed.
    """

    def __init__(
        self,
        load: Workload,
        everything: Sequence[Tenant],
        first_tiers: Mapping[str, Sequence[Tier]],
        room: int,
        tile: int,
        slots: int | None,
    ) -> None:
        self._load = load
        self._tenants = everything
        self._room = room
        self._first_tiers = first_tiers
        self._tiers = {kind: list(tiers) for kind, tiers in first_tiers.items()}
        self._runs: list[TileRun] = []
        self._tile, self._slots = tile, slots
        self._fits = True

    def run(self) -> Filled | None:
        """Fill the room. Returns None if there are no slots, and something does not fit."""
        # (traffic per byte, bytes of it that are written, whether each pass has it), and what keeps these bytes in host
        # memory.
        offers: list[tuple[tuple[float, float, bool], Callable[[], None]]] = []
        for tenant in self._tenants:
            if tenant.kind == OPTIMIZER_STATE:
                # The room for its slots depends on what else streams.
                offers.append((_traffic_per_byte(tenant.pieces), self._keep_state))
            elif tenant.kind == PARAMETERS:
                offers += [
                    (_traffic_per_byte([piece]), partial(self._keep_pieces, tenant, [index]))
                    for index, piece in enumerate(tenant.pieces)
                ]
            else:
                waiting = self._waiting(tenant)
                pieces = [tenant.pieces[index] for index in waiting]
                offers.append((_traffic_per_byte(pieces), partial(self._keep_together, tenant, waiting)))
        for _, keep in sorted(offers, key=lambda offer: offer[0], reverse=True):
            keep()
        if self._slots is None:
            return Filled(self._tiers, self._runs, Staging()) if self._fits else None
        return Filled(self._tiers, self._runs, self._staging(self._tiers))

    def _waiting(self, tenant: Tenant) -> list[int]:
        """The pieces that stream. Those without planned traffic keep their extent, for gradients that are not final in
        time.
        """
        pieces = enumerate(zip(tenant.pieces, self._first_tiers[tenant.kind], strict=True))
        streamed = [(i, piece) for i, (piece, tier) in pieces if tier is Tier.NVME and not piece.fixed]
        return [i for i, piece in streamed if self._slots is None or piece.read or piece.written]

    def _keep(self, nbytes: int, *, offloaded: bool) -> bool:
        """Take ``nbytes`` of the room, if there are as many. ``cache_in_host`` false refuses what is ``offloaded``."""
        # SGD in fp32 has no state to move.
        if not nbytes:
            return True
        if nbytes <= self._room and self._may_keep(offloaded=offloaded):
            self._room -= nbytes
            return True
        self._fits = False
        return False

    def _may_keep(self, *, offloaded: bool) -> bool:
        return self._load.cache_in_host or not offloaded

    def _keep_pieces(self, tenant: Tenant, indices: Iterable[int]) -> None:
        tiers = self._tiers[tenant.kind]
        for index in indices:
            if tiers[index] is Tier.NVME and self._keep(
                tenant.pieces[index].nbytes, offloaded=tenant.offloaded
            ):
                tiers[index] = Tier.HOST

    def _keep_together(self, tenant: Tenant, waiting: Sequence[int]) -> None:
        """All pieces together: their window is free for other bytes only if none of them streams through it."""
        first = self._first_tiers[tenant.kind]
        streamed = [tier is Tier.NVME and not p.fixed for p, tier in zip(tenant.pieces, first, strict=True)]
        all_wait = len(waiting) == sum(streamed)
        window = tenant.window_bytes(first) if self._slots is not None and all_wait else 0
        fits = sum(tenant.pieces[index].nbytes for index in waiting) <= self._room + window
        if fits and self._may_keep(offloaded=tenant.offloaded):
            self._room += window
        self._keep_pieces(tenant, waiting)

    def _keep_state(self) -> None:
        if self._slots is not None:
            self._room += self._staging(self._first_tiers).nbytes - self._staging(self._tiers).nbytes
        load = self._load
        for index, (group, home) in enumerate(zip(load.groups, load.optimizer_tiers, strict=True)):
            numel = load.state_numel(group)
            # Tiles that visit the device need no host slots, so the room for host slots must not limit their size.
            visits = has_to_visit(load, home, self._tiers[PARAMETERS][index])
            step = tile_numel(numel, largest_tile(load) if visits else self._tile)
            ends = {home: numel}
            if home is Tier.NVME:
                kept = self._keep_tiles(numel, step, load.of(group).state_itemsize)
                ends = {Tier.HOST: kept, Tier.NVME: numel}
            start = 0
            for tier, end in ends.items():
                if start < end:
                    self._runs.append(TileRun(index, start, end, step, tier))
                    start = end

    def _keep_tiles(self, numel: int, step: int, itemsize: int) -> int:
        """Take room for as many tiles of ``step`` elements as possible, from the first; returns their elements."""
        # SGD in fp32 has no state to move.
        if not itemsize:
            return numel
        room = max(0, self._room // itemsize) if self._may_keep(offloaded=True) else 0
        kept = numel if room >= numel else room // step * step
        self._room -= kept * itemsize
        self._fits = self._fits and kept == numel
        return kept

    def _staging(self, tiers: Mapping[str, Sequence[Tier]]) -> Staging:
        assert self._slots is not None
        return slots_for(self._load, self._tile, self._slots, tiers[PARAMETERS], tiers[GRADIENTS])


def _traffic_per_byte(pieces: Sequence[TenantPiece]) -> tuple[float, float, bool]:
    """Bytes over NVMe in a step for each byte of ``pieces`` that lives there: (read and written, only written).

    The third value is whether each pass moves them.
    """
    nbytes = max(sum(piece.nbytes for piece in pieces), 1)
    written = sum(piece.written for piece in pieces)
    always = not any(piece.routed for piece in pieces)
    return (sum(piece.read for piece in pieces) + written) / nbytes, written / nbytes, always
