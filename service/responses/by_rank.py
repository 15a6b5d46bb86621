"""Answers by run and rank, to ``?run=`` and ``?rank=``: parts of what each rank says, under the names it gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from service.view import RankView, View
from tiering.telemetry import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    DeviceMemoryStatus,
    IoEngineStatus,
    LinkStatus,
    PathStatus,
    Snapshot,
    StepRecord,
    TierStatus,
    figures,
)

SNAPSHOT = figures(Snapshot)

Answer = TypeVar("Answer", bound="OfRank")


class OfRank(BaseModel):
    """What every answer about a rank has."""

    rank: int


class OfRun(BaseModel, Generic[Answer]):
    """One run, with those of its ranks on this node that say anything about what is asked."""

    id: str = Field(description="the same on all ranks of one start, and of no other")
    name: str = Field(description="as configured; several runs may have the same")
    ranks: list[Answer]


class ByRank(BaseModel, Generic[Answer]):
    """Every run that is asked for."""

    runs: list[OfRun[Answer]]


class RankTiers(OfRank):
    """The tiers of one rank, fastest first, and beside them the activations and torch's own memory on a GPU."""

    tiers: list[TierStatus]
    activations: ActivationStatus | None
    device_memory: DeviceMemoryStatus | None


class RankBandwidth(OfRank):
    """Bytes per second of one rank, now, on average over the time with transfers, and at most; latency percentiles."""

    io: list[PathStatus]
    io_engine: IoEngineStatus | None
    link: LinkStatus | None = Field(description=SNAPSHOT["link"].help)
    collectives: list[CollectiveStatus]


class RankSteps(OfRank):
    """The most recent steps of one rank, oldest first, and sums since its start."""

    step: int
    phase: str
    phase_seconds: dict[str, float] = Field(description=SNAPSHOT["phase_seconds"].help)
    stalls_by_phase: dict[str, dict[str, float]] = Field(description=SNAPSHOT["stalls_by_phase"].help)
    steps: list[StepRecord]


class RankConfig(OfRank):
    """What one rank was configured with, what it computes on, and the versions of what it runs."""

    device: str
    versions: dict[str, str]
    configuration: ConfigurationStatus | None


def tiers(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankTiers]:
    return by_rank(view, run, rank, _part(RankTiers, "snapshot"))


def bandwidth(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankBandwidth]:
    return by_rank(view, run, rank, _part(RankBandwidth, "snapshot"))


def steps(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankSteps]:
    return by_rank(view, run, rank, _part(RankSteps, "snapshot"))


def config(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankConfig]:
    return by_rank(view, run, rank, _part(RankConfig, "description"))


def _part(model: type[Answer], of: Literal["snapshot", "description"]) -> Callable[[RankView], Answer | None]:
    """The fields of ``model`` as that part of a page has them."""
    names = model.model_fields.keys() - {"rank"}

    def told(one: RankView) -> Answer | None:
        said = getattr(one, of)
        if said is None:
            return None
        return model(rank=one.rank, **{name: getattr(said, name) for name in names})

    return told


def by_rank(
    view: View, run: str | None, rank: int | None, told: Callable[[RankView], Answer | None]
) -> ByRank[Answer]:
    """``told`` of every rank that is asked for; ranks of which it returns None are left out.

    Raises NotHereError where what is asked for is not on this node.
    """
    return ByRank[Answer](
        runs=[
            OfRun[Answer](
                id=one.id,
                name=one.name,
                ranks=[answer for each in one.ranks if (answer := told(each)) is not None],
            )
            for one in view.select(run, rank)
        ]
    )
