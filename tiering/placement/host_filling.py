"""Fills the host budget with what would otherwise live on NVMe: the most traffic per byte first. Pure.

At equal traffic, what is written comes before what is only read, because writes wear a drive. So training adapters with
room for them writes nothing to NVMe, although their frozen model is read from it. Experts come last: their traffic is
that of a pass which routes tokens to all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tiering.placement.plan import Staging, TileRun
from tiering.placement.slots import SlotRoom, has_to_visit, tile_numel, usual_tile
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

    The pieces of a tenant start on ``first_tiers``, by its kind. State passes through ``slots``; without slots,
    everything has to fit. ``room`` does not include the slots and the windows, but their bytes are used too if they are
    not needed.
    """

    def __init__(
        self,
        load: Workload,
        everything: Sequence[Tenant],
        first_tiers: Mapping[str, Sequence[Tier]],
        room: int,
        slots: SlotRoom | None,
    ) -> None:
        self._load = load
        self._tenants = everything
        self._room = room
        self._first_tiers = first_tiers
        self._tiers = {kind: list(tiers) for kind, tiers in first_tiers.items()}
        self._runs: list[TileRun] = []
        self._slots = slots
        self._fits = True

    def run(self) -> Filled | None:
        """Fill the room. Returns None if there are no slots, and something does not fit."""
        # What keeps bytes in host memory, by their traffic.
        offers: list[tuple[_Traffic, Callable[[], None]]] = []
        for tenant in self._tenants:
            if tenant.kind == OPTIMIZER_STATE:
                # The room for its slots depends on what else streams.
                offers.append((_traffic_per_byte(tenant.pieces), self._keep_state))
            elif tenant.kind == PARAMETERS:
                traffic = {at: _traffic_per_byte([piece]) for at, piece in tenant.distinct.items()}
                alike: dict[_Traffic, list[int]] = {}
                for index, at in enumerate(map(id, tenant.pieces)):
                    alike.setdefault(traffic[at], []).append(index)
                offers += [
                    (each, partial(self._keep_pieces, tenant, indices)) for each, indices in alike.items()
                ]
            else:
                waiting = self._waiting(tenant)
                pieces = [tenant.pieces[index] for index in waiting]
                offers.append((_traffic_per_byte(pieces), partial(self._keep_together, tenant, waiting)))
        for _, keep in sorted(offers, key=lambda offer: offer[0], reverse=True):
            keep()
            if self._slots is None and not self._fits:
                return None
        staging = Staging() if self._slots is None else self._staging(self._tiers)
        return Filled(self._tiers, self._runs, staging)

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
        streamed = (
            count for piece, tier, count in tenant.counted(first) if tier is Tier.NVME and not piece.fixed
        )
        all_wait = len(waiting) == sum(streamed)
        window = tenant.window_bytes(first) if self._slots is not None and all_wait else 0
        fits = sum(tenant.pieces[index].nbytes for index in waiting) <= self._room + window
        if fits and self._may_keep(offloaded=tenant.offloaded):
            self._room += window
        self._keep_pieces(tenant, waiting)

    def _keep_state(self) -> None:
        if self._slots is not None:
            self._room += self._staging(self._first_tiers).nbytes - self._staging(self._tiers).nbytes
        load, usual = self._load, usual_tile(self._load)
        largest = usual if self._slots is None else self._slots.tile
        # Of each kind of groups, by the home of their parameters: elements, those of a tile, and state bytes of each.
        sizes: dict[tuple[int, Tier], tuple[int, int, int]] = {}
        params = self._tiers[PARAMETERS]
        for index, (kind, param, home) in enumerate(
            zip(load.kinds.of, params, load.optimizer_tiers, strict=True)
        ):
            if (kind, param) not in sizes:
                group = load.groups[index]
                # Tiles that visit the device need no host slots, so the room for host slots must not limit their size.
                visits, numel = has_to_visit(load, home, param), load.state_numel(group)
                step = tile_numel(numel, usual if visits else largest)
                sizes[kind, param] = numel, step, load.of(group).state_itemsize
            numel, step, itemsize = sizes[kind, param]
            kept = 0
            if home is Tier.NVME:
                kept = self._keep_tiles(numel, step, itemsize)
                if kept:
                    self._runs.append(TileRun(index, 0, kept, step, Tier.HOST))
            if kept < numel:
                self._runs.append(TileRun(index, kept, numel, step, home))

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
        return self._slots.staging(tiers[PARAMETERS], tiers[GRADIENTS])


class _Traffic(NamedTuple):
    """Bytes over NVMe in a step for each byte that lives there: those read and written, and those written.

    ``always``: each pass moves them.
    """

    moved: float
    written: float
    always: bool


def _traffic_per_byte(pieces: Sequence[TenantPiece]) -> _Traffic:
    """The traffic of ``pieces`` together."""
    counts = Counter(map(id, pieces))
    alike = [(piece, counts[at]) for at, piece in {id(piece): piece for piece in pieces}.items()]
    nbytes = max(sum(count * piece.nbytes for piece, count in alike), 1)
    written = sum(count * piece.written for piece, count in alike)
    read = sum(count * piece.read for piece, count in alike)
    always = not any(piece.routed for piece, _ in alike)
    return _Traffic((read + written) / nbytes, written / nbytes, always)
