"""``/v1/steps``: the recent steps of each rank, and where their time went."""

from __future__ import annotations

from pydantic import Field

from service.answers.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import StepRecord


class RankSteps(OfRank):
    """The most recent steps of one rank, oldest first, and sums since its start."""

    step: int
    phase: str
    phase_seconds: dict[str, float] = Field(description="since the start, by phase")
    stalls_by_phase: dict[str, dict[str, float]] = Field(
        description="seconds that compute waited since the start, by phase and cause"
    )
    steps: list[StepRecord]


def steps(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankSteps]:
    def told(one: RankView) -> RankSteps | None:
        said = one.snapshot
        if said is None:
            return None
        return RankSteps(
            rank=said.rank,
            step=said.step,
            phase=said.phase,
            phase_seconds=said.phase_seconds,
            stalls_by_phase=said.stalls_by_phase,
            steps=said.steps,
        )

    return by_rank(view, run, rank, told)
