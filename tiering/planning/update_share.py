"""How much of the optimizer state a GPU should update, on a visit there, beside the CPU. Pure: a Plan and Rates in.

The CPU and the GPU update at the same time, so the fastest is to give each as much as both are done with together. What
the GPU gets takes the time of its link, both ways at once, or of its memory if that is slower; the CPU has what is left
and what no GPU can reach, by its kernels' rate. Both use host memory: where somebody knows how fast that is, no share
makes it faster.
"""

from __future__ import annotations

from dataclasses import replace

from tiering.errors import PlacementError
from tiering.placement.placement import place
from tiering.placement.plan import Budgets, Tier, Workload
from tiering.planning.forecast import link_seconds, updated_on_device
from tiering.planning.rates import Rates

SHARES = [hundredths / 100 for hundredths in range(101)]
WORTH_A_WINDOW = (
    0.05  # what saves less of an update's time is not worth the device memory that it passes through
)


def best_share(load: Workload, budgets: Budgets, rates: Rates) -> float:
    """The share of state in host memory that should visit the GPU, one of SHARES; 0 where a rate is not known.

    ``rates`` are those of one rank. Raises nothing: what has no plan has no share.
    """
    kernels = rates.optimizer
    if load.device_is_host or kernels is None or rates.device_link is None:
        return 0.0
    try:
        plan = place(replace(load, update_on_device=1.0), budgets)
    except PlacementError:
        return 0.0
    visiting = [tile for tile in plan.sub_groups if tile.visits and tile.tier is Tier.HOST]
    elements = sum(tile.numel for tile in visiting)
    if not elements:
        return 0.0
    there, back = (sum(way) for way in zip(*(plan.visited(tile) for tile in visiting), strict=True))
    on_device = link_seconds(there, back, rates)
    if rates.device_memory is not None:
        on_device = max(on_device, updated_on_device(load, elements) / rates.device_memory)
    beside = sum(t.numel for t in plan.sub_groups if t.tier is not Tier.DEVICE and not t.visits)

    def seconds(share: float) -> float:
        stepped = (1 - share) * elements + beside
        busiest: float = max(share * on_device, stepped / kernels)
        if rates.host_memory is not None:
            moved = share * (there + back) + stepped * load.stepped_bytes
            busiest = max(busiest, moved / rates.host_memory)
        return busiest

    least = min(map(seconds, SHARES))
    if least > (1 - WORTH_A_WINDOW) * seconds(0.0):
        return 0.0
    return next(share for share in SHARES if seconds(share) == least)
