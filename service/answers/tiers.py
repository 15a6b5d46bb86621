"""``/v1/tiers``: what each tier holds, may hold and held at most, by rank."""

from __future__ import annotations

from service.answers.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import ActivationStatus, TierStatus


class RankTiers(OfRank):
    """The tiers of one rank, fastest first, and the activations beside them."""

    tiers: list[TierStatus]
    activations: ActivationStatus | None


def tiers(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankTiers]:
    def told(one: RankView) -> RankTiers | None:
        said = one.snapshot
        if said is None:
            return None
        return RankTiers(rank=said.rank, tiers=said.tiers, activations=said.activations)

    return by_rank(view, run, rank, told)
