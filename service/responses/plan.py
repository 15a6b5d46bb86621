"""``/v1/plan``: the plan, compared with the measured values."""

from __future__ import annotations

from statistics import median

from pydantic import BaseModel, Field

from service.recent_steps import steady_steps
from service.responses.by_rank import ByRank, OfRank, by_rank
from service.view import RankView, View
from tiering.telemetry import PlanStatus, Snapshot, TierStatus


class PlanAndReality(BaseModel):
    """One quantity, planned and measured. ``found`` is None until there is a measured value."""

    name: str
    unit: str = Field(description="bytes, or bytes per step")
    planned: int
    found: int | None


class RankPlan(OfRank):
    """The plan of one rank, compared with its peak per tier and with the median of its recent steps."""

    plan: PlanStatus
    compared: list[PlanAndReality]


def plan(view: View, run: str | None = None, rank: int | None = None) -> ByRank[RankPlan]:
    def item(rank: RankView) -> RankPlan | None:
        if rank.description is None or rank.description.plan is None or rank.snapshot is None:
            return None
        planned = rank.description.plan
        return RankPlan(rank=rank.rank, plan=planned, compared=compared(planned, rank.snapshot))

    return by_rank(view, run, rank, item)


def compared(planned: PlanStatus, snapshot: Snapshot) -> list[PlanAndReality]:
    """The planned and the measured peak of each tier, and the planned and the measured bytes of a recent step.

    The bytes of activations are included if the plan has them: they depend on the batch, which it may not know.
    """
    tiers: dict[str, TierStatus] = {tier.name: tier for tier in snapshot.tiers}
    pairs = [
        PlanAndReality(
            name=f"{tier.name} peak",
            unit="bytes",
            planned=tier.planned,
            found=tiers[tier.name].peak if tier.name in tiers else None,
        )
        for tier in planned.tiers
    ]
    recent = steady_steps(snapshot)
    has_read, has_written = (
        bool(planned_bytes.get("activations")) for planned_bytes in (planned.read, planned.written)
    )
    for name, bytes_planned, moved in (
        (
            "read from NVMe",
            planned.read,
            [step.read_bytes - (0 if has_read else step.activation_read_bytes) for step in recent],
        ),
        (
            "written to NVMe",
            planned.written,
            [step.written_bytes - (0 if has_written else step.activation_written_bytes) for step in recent],
        ),
        ("sent to other ranks", planned.sent, [step.sent_bytes for step in recent]),
    ):
        total = sum(bytes_planned.values())
        middle = round(median(moved)) if moved else None
        if total or middle:
            pairs.append(PlanAndReality(name=name, unit="bytes per step", planned=total, found=middle))
    return pairs
