"""What more host memory would do for a step: which bytes it would keep off NVMe. Pure arithmetic on a plan.

How much would keep all of them off, the plan says. With less, a placement fills the host budget in one order,
parameters first, then gradients, then optimizer state by the tile (tiering/placement/placement.py), so what a larger
budget would hold follows from what the plan has on NVMe. Where staging would grow with the budget, the most that it may
grow to is allowed for: a plan with the named budget keeps no less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiering.telemetry import PlannedTier, PlanStatus

IN_ORDER = ("parameters", "gradients", "optimizer state")
# Bytes: six slots of 2 Mi elements with 20 bytes each, the largest that a plan makes.
MOST_STAGING = 240 << 20
STAGING_SHARE = 3  # staging takes at most this fraction (1/n) of a host budget
NEGLIGIBLE = 0.1  # of what a step moves: less is no remedy


@dataclass(frozen=True)
class Relief:
    """A larger host budget of one rank: ``extra`` bytes more than now, and the bytes on NVMe that it would hold.

    ``saved`` of the ``moved`` bytes that a step reads and writes would stay in memory. ``kept`` is by kind; ``whole``
    names the kinds of which nothing would be left on NVMe.
    """

    host_budget: int
    extra: int
    moved: int
    saved: int
    kept: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


def on_tier(plan: PlanStatus, name: str) -> PlannedTier | None:
    """What the plan has there."""
    return next((tier for tier in plan.tiers if tier.name == name), None)


def as_setting(nbytes: int) -> str:
    """Bytes as a value for the configuration, rounded up."""
    unit, name = (1 << 30, "GiB") if nbytes >= 10 << 30 else (1 << 20, "MiB")
    return f'"{-(-nbytes // unit)}{name}"'


def relief(plan: PlanStatus, free: int) -> Relief | None:
    """What ``free`` more bytes of host memory would do at most; None if nothing that is worth it."""
    host, nvme, everything = on_tier(plan, "host"), on_tier(plan, "nvme"), plan.host_without_nvme
    moved = sum(plan.read.values()) + sum(plan.written.values())
    if host is None or nvme is None or everything is None:
        return None
    extra = everything - host.budget
    if extra <= 0:  # there is room already: something else than the budget keeps it on NVMe
        return None
    left = {kind: nbytes for kind in IN_ORDER if (nbytes := nvme.by_kind.get(kind, 0))}
    if extra <= free:
        kept = {kind: nbytes for kind, nbytes in left.items() if _moves(plan, kind)}
        return Relief(everything, extra, moved, moved, kept, tuple(kept))
    return _part(plan, host, left, free, moved)


def _part(
    plan: PlanStatus, host: PlannedTier, left: Mapping[str, int], free: int, moved: int
) -> Relief | None:
    budget = host.budget + free
    room = budget - host.planned - min(_largest_staging(host), budget // STAGING_SHARE)
    saved, kept, whole = 0.0, {}, []
    for kind, nbytes in left.items():
        fits = max(0, min(nbytes, room))
        room -= fits
        if fits and _moves(plan, kind):
            saved += _moves(plan, kind) * fits / nbytes
            kept[kind] = fits
            whole += [kind] if fits == nbytes else []
    if saved < NEGLIGIBLE * moved:
        return None
    return Relief(budget, free, moved, int(saved), kept, tuple(whole))


def _moves(plan: PlanStatus, kind: str) -> int:
    """Bytes that a step reads and writes for it. Gradients may have room on NVMe that a steady step never uses."""
    return plan.read.get(kind, 0) + plan.written.get(kind, 0)


def _largest_staging(host: PlannedTier) -> int:
    """The most bytes that staging takes within any budget; a rank that steps whole groups has larger slots."""
    return max(MOST_STAGING, 2 * host.by_kind.get("staging", 0))
