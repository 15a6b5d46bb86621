"""Responses by run and rank, with the filters ``?run=`` and ``?rank=``: fields of a rank's snapshot or description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

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
    TrainingCurve,
    figures,
)

SNAPSHOT = figures(Snapshot)

Item = TypeVar("Item", bound="OfRank")


class OfRank(BaseModel):
    """The base of every item about a rank."""

    rank: int


class OfRun(BaseModel, Generic[Item]):
    """One run, with its ranks on this node that have the requested fields."""

    id: str = Field(description="the same on all ranks of one start, unique among starts")
    name: str = Field(description="as configured; several runs may have the same name")
    ranks: list[Item]


class ByRank(BaseModel, Generic[Item]):
    """Every requested run."""

    runs: list[OfRun[Item]]


class RankTiers(OfRank):
    """The tiers of one rank, fastest first, the activations, and torch's memory on a GPU."""

    tiers: list[TierStatus]
    activations: ActivationStatus | None
    device_memory: DeviceMemoryStatus | None


class RankBandwidth(OfRank):
    """Bytes per second of one rank: current, average over the time with transfers, and peak; latency percentiles."""

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


class RankCurve(OfRank):
    """The training curve of the run since the start, from the first rank on each node."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    world_size: int = Field(description=SNAPSHOT["world_size"].help)
    curve: TrainingCurve


class RankConfig(OfRank):
    """The configuration of one rank, its device, and the versions of its software."""

    device: str
    versions: dict[str, str]
    configuration: ConfigurationStatus | None


def tiers(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankTiers]:
    return by_rank(view, run, rank, _part(RankTiers, "snapshot"))


def bandwidth(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankBandwidth]:
    return by_rank(view, run, rank, _part(RankBandwidth, "snapshot"))


def steps(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankSteps]:
    return by_rank(view, run, rank, _part(RankSteps, "snapshot"))


def curve(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankCurve]:
    def item(rank: RankView) -> RankCurve | None:
        snapshot = rank.snapshot
        if snapshot is None or snapshot.curve is None:
            return None
        return RankCurve(rank=rank.rank, world_size=snapshot.world_size, curve=snapshot.curve)

    return by_rank(view, run, rank, item)


def config(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankConfig]:
    return by_rank(view, run, rank, _part(RankConfig, "description"))


def _part(model: type[Item], source: Literal["snapshot", "description"]) -> Callable[[RankView], Item | None]:
    """A function that fills ``model`` with the fields of the same name of a rank's snapshot or description."""
    names = model.model_fields.keys() - {"rank"}

    def item(rank: RankView) -> Item | None:
        record = getattr(rank, source)
        if record is None:
            return None
        return model(rank=rank.rank, **{name: getattr(record, name) for name in names})

    return item


def by_rank(
    view: View, run: str | None, rank: int | None, item: Callable[[RankView], Item | None]
) -> ByRank[Item]:
    """``item`` of every requested rank; ranks for which it returns None are left out.

    Raises NotHereError if no run or rank on this node matches.
    """
    return ByRank[Item](
        runs=[
            OfRun[Item](
                id=run_view.id,
                name=run_view.name,
                ranks=[entry for rank_view in run_view.ranks if (entry := item(rank_view)) is not None],
            )
            for run_view in view.select(run, rank)
        ]
    )
