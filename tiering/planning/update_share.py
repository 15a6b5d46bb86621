"""The device fraction: how much of the optimizer state a GPU should update while the CPU updates the rest. Pure.

The CPU and the GPU update at the same time, so the optimum is where both finish together. The GPU's part takes the time
of its link in both directions, or of its memory if that is slower. The CPU updates the rest, and the state that no GPU
can reach, at its kernels' rate. Both use host memory; if its bandwidth is known, it bounds the time for any fraction.
"""

from __future__ import annotations

from dataclasses import replace

from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier, Workload
from tiering.planning.forecast import link_seconds, updated_on_device
from tiering.planning.rates import Rates

SHARES = [hundredths / 100 for hundredths in range(101)]
# Fraction of the update's time. A smaller gain does not justify the device memory for the slots.
WORTH_A_WINDOW = 0.05


def best_share(load: Workload, budgets: Budgets, rates: Rates) -> float:
    """The fraction of the state in host memory that should visit the GPU, one of SHARES; 0 if a rate is unknown.

    ``rates`` are those of one rank. Without a plan the fraction is 0; nothing is raised.
    """
    kernels = rates.optimizer
    if load.device_is_host or kernels is None or rates.device_link is None:
        return 0.0
    try:
        plan = place(replace(load, update_on_device=1.0), budgets)
    except PlacementError:
        return 0.0
    visiting = [tile for tile in plan.runs if tile.visits and tile.tier is Tier.HOST]
    elements = sum(tile.numel for tile in visiting)
    if not elements:
        return 0.0
    to_device, from_device = (
        sum(way) for way in zip(*(plan.visited(tile) for tile in visiting), strict=True)
    )
    on_device = link_seconds(to_device, from_device, rates)
    if rates.device_memory is not None:
        on_device = max(on_device, updated_on_device(load, elements) / rates.device_memory)
    cpu_only = sum(t.numel for t in plan.runs if t.tier is not Tier.DEVICE and not t.visits)

    def seconds(share: float) -> float:
        stepped = (1 - share) * elements + cpu_only
        busiest: float = max(share * on_device, stepped / kernels)
        if rates.host_memory is not None:
            moved = share * (to_device + from_device) + stepped * load.stepped_bytes
            busiest = max(busiest, moved / rates.host_memory)
        return busiest

    least = min(map(seconds, SHARES))
    if least > (1 - WORTH_A_WINDOW) * seconds(0.0):
        return 0.0
    return next(share for share in SHARES if seconds(share) == least)
