"""``/v1/plan``: what the placement said, beside what is."""

from __future__ import annotations

from statistics import median

from pydantic import BaseModel, Field

from service.recent_steps import steady
from service.responses.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import PlanStatus, Snapshot, TierStatus


class PlanAndReality(BaseModel):
    """One quantity, planned and found. ``found`` is None while nothing can be said."""

    name: str
    unit: str = Field(description="bytes, or bytes per step")
    planned: int
    found: int | None


class RankPlan(OfRank):
    """The plan of one rank beside its peaks per tier, and beside the median of its recent steps."""

    plan: PlanStatus
    compared: list[PlanAndReality]


def plan(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankPlan]:
    def told(one: RankView) -> RankPlan | None:
        if one.description is None or one.description.plan is None or one.snapshot is None:
            return None
        planned = one.description.plan
        return RankPlan(rank=one.rank, plan=planned, compared=compared(planned, one.snapshot))

    return by_rank(view, run, rank, told)


def compared(planned: PlanStatus, said: Snapshot) -> list[PlanAndReality]:
    """The peak of each tier, and what recent steps moved, beside what was planned."""
    found: dict[str, TierStatus] = {tier.name: tier for tier in said.tiers}
    pairs = [
        PlanAndReality(
            name=f"{tier.name} peak",
            unit="bytes",
            planned=tier.planned,
            found=found[tier.name].peak if tier.name in found else None,
        )
        for tier in planned.tiers
    ]
    recent = steady(said)
    for name, bytes_planned, moved in (
        ("read from NVMe", planned.read, [step.read_bytes for step in recent]),
        ("written to NVMe", planned.written, [step.written_bytes for step in recent]),
        ("sent to other ranks", planned.sent, [step.sent_bytes for step in recent]),
    ):
        total = sum(bytes_planned.values())
        middle = round(median(moved)) if moved else None
        if total or middle:
            pairs.append(PlanAndReality(name=name, unit="bytes per step", planned=total, found=middle))
    return pairs
