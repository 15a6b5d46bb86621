"""``/v1/config``: the configuration in effect, with the origin of each value, by rank."""

from __future__ import annotations

from service.answers.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import ConfigurationStatus


class RankConfig(OfRank):
    """What one rank was configured with, what it computes on, and the versions of what it runs."""

    device: str
    versions: dict[str, str]
    configuration: ConfigurationStatus | None


def config(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankConfig]:
    def told(one: RankView) -> RankConfig | None:
        said = one.description
        if said is None:
            return None
        return RankConfig(
            rank=one.rank, device=said.device, versions=said.versions, configuration=said.configuration
        )

    return by_rank(view, run, rank, told)
