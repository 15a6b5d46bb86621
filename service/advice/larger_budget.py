"""The effect of a larger host budget on a step: the bytes that it would keep off NVMe. Pure arithmetic on a plan.

The plan has the host budget with which nothing is on NVMe. With a smaller one, placement fills the host budget in a
fixed order: parameters, gradients, then optimizer state tile by tile (tiering/placement/placement.py). So the bytes
that a larger budget would hold follow from the bytes that the plan has on NVMe. Staging may grow with the budget; this
estimate subtracts its maximum, so a plan with the suggested budget keeps at least as many bytes in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiering.telemetry import PlannedTier, PlanStatus

PLACEMENT_ORDER = ("parameters", "gradients", "optimizer state")
# Bytes: six slots of 2 Mi elements of 20 bytes, the largest staging that a plan makes while little is on NVMe.
MAX_STAGING = 240 << 20
# More of it takes at most a part (1/n) of what is on NVMe beyond these bytes, and less with a larger budget.
LITTLE_ON_NVME = 4 << 30
GROWTH_DIVISOR = 8
STAGING_DIVISOR = 3  # staging takes at most 1/3 of a host budget
NEGLIGIBLE = 0.1  # of the bytes that a step moves: a remedy must save more


@dataclass(frozen=True)
class LargerBudget:
    """A host budget of one rank, ``extra`` bytes larger than the current one, and its effect.

    Of the ``moved`` bytes that a step reads and writes on NVMe, ``saved`` would stay in memory. ``bytes_in_memory`` are
    the bytes that would move from NVMe to memory, by kind; ``whole`` lists the kinds that would have no bytes on NVMe.
    """

    host_budget: int
    extra: int
    moved: int
    saved: int
    bytes_in_memory: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()


def on_tier(plan: PlanStatus, name: str) -> PlannedTier | None:
    """The part of the plan for the tier with this name."""
    return next((tier for tier in plan.tiers if tier.name == name), None)


def as_setting(nbytes: int) -> str:
    """Bytes as a value for the configuration, rounded up."""
    unit, name = (1 << 30, "GiB") if nbytes >= 10 << 30 else (1 << 20, "MiB")
    return f'"{-(-nbytes // unit)}{name}"'


def larger_budget(plan: PlanStatus, free: int) -> LargerBudget | None:
    """The best host budget that is at most ``free`` bytes larger; None if the effect is negligible."""
    host, nvme, everything = on_tier(plan, "host"), on_tier(plan, "nvme"), plan.host_without_nvme
    moved = sum(plan.read.values()) + sum(plan.written.values())
    if host is None or nvme is None or everything is None:
        return None
    extra = everything - host.budget
    if extra <= 0:  # the budget is large enough: another setting keeps the bytes on NVMe
        return None
    on_nvme = {kind: nbytes for kind in PLACEMENT_ORDER if (nbytes := nvme.by_kind.get(kind, 0))}
    if extra <= free:
        bytes_in_memory = {kind: nbytes for kind, nbytes in on_nvme.items() if _moves(plan, kind)}
        return LargerBudget(everything, extra, moved, moved, bytes_in_memory, tuple(bytes_in_memory))
    return _partial(plan, host, on_nvme, free, moved)


def _partial(
    plan: PlanStatus, host: PlannedTier, on_nvme: Mapping[str, int], free: int, moved: int
) -> LargerBudget | None:
    budget = host.budget + free
    room = (
        budget - host.planned - min(_largest_staging(host, sum(on_nvme.values())), budget // STAGING_DIVISOR)
    )
    saved, bytes_in_memory, whole = 0.0, {}, []
    for kind, nbytes in on_nvme.items():
        fits = max(0, min(nbytes, room))
        room -= fits
        if fits and _moves(plan, kind):
            saved += _moves(plan, kind) * fits / nbytes
            bytes_in_memory[kind] = fits
            whole += [kind] if fits == nbytes else []
    if saved < NEGLIGIBLE * moved:
        return None
    return LargerBudget(budget, free, moved, int(saved), bytes_in_memory, tuple(whole))


def _moves(plan: PlanStatus, kind: str) -> int:
    """Bytes of this kind that a step reads and writes. Gradients may have NVMe space that a steady step never uses."""
    return plan.read.get(kind, 0) + plan.written.get(kind, 0)


def _largest_staging(host: PlannedTier, on_nvme: int) -> int:
    """The maximum bytes of staging with a larger budget; a rank that updates whole groups has larger slots."""
    more = max(0, on_nvme - LITTLE_ON_NVME) // GROWTH_DIVISOR
    return max(MAX_STAGING, 2 * host.by_kind.get("staging", 0)) + more
