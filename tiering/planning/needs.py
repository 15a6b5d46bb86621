"""What each node of other machines needs, where nobody gave a budget: host memory, and swap space on NVMe. Pure.

Without a limit, everything would live in host memory. So the plan has little more than the least host memory with which
the model trains, and the rest on NVMe. More host memory only saves NVMe traffic.
"""

from __future__ import annotations

from dataclasses import replace

from tiering.placement.budgets import MIB
from tiering.placement.placement import AMPLE, BudgetError, place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.slots import usual_room
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import round_up


def open_tiers(budgets: Budgets) -> tuple[Tier, ...]:
    """The tiers without a limit."""
    return tuple(tier for tier in (Tier.HOST, Tier.NVME) if budgets.of(tier) >= AMPLE)


def place_with_needs(load: Workload, budgets: Budgets) -> Plan:
    """Like ``place``. If ``budgets`` do not limit host memory, that of the plan is what it needs, in whole MiB.

    It needs what the refusals of a plan with less name, and memory for tiles of the usual size if state is on NVMe.
    """
    if Tier.HOST not in open_tiers(budgets):
        return place(load, budgets)
    usual = usual_room(load) if Tier.NVME in (load.offload_param, load.offload_optimizer) else 0
    needed = 0
    while True:
        try:
            return place(load, replace(budgets, host=round_up(needed + usual, MIB)))
        except BudgetError as refusal:
            if refusal.tier is not Tier.HOST or needed >= AMPLE:
                raise
            # Twice as much, where a refusal names less than the plan had.
            needed = max(refusal.nbytes, 2 * needed)


def with_needed_nvme(plan: Plan) -> Plan:
    """``plan`` with the swap space that it needs as its budget, in whole MiB, if that has no limit."""
    if Tier.NVME not in open_tiers(plan.budgets):
        return plan
    return replace(plan, budgets=replace(plan.budgets, nvme=round_up(plan.total(Tier.NVME), MIB)))
