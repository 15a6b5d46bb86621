"""``/v1/bandwidth``: each path in both directions, and the collectives, by rank."""

from __future__ import annotations

from service.answers.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import CollectiveStatus, IoEngineStatus, PathStatus


class RankBandwidth(OfRank):
    """Bytes per second of one rank, now, on average over the time with transfers, and at most; latency percentiles."""

    io: list[PathStatus]
    io_engine: IoEngineStatus | None
    collectives: list[CollectiveStatus]


def bandwidth(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankBandwidth]:
    def told(one: RankView) -> RankBandwidth | None:
        said = one.snapshot
        if said is None:
            return None
        return RankBandwidth(
            rank=said.rank, io=said.io, io_engine=said.io_engine, collectives=said.collectives
        )

    return by_rank(view, run, rank, told)
