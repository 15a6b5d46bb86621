"""How much of the optimizer state a GPU should update, on a visit there, beside the CPU. Pure: a Plan and Rates in.

The CPU and the GPU update at the same time, so the fastest is to give each as much as both are done with together. What
the GPU gets takes the time of its link, both ways at once, or of its memory if that is slower; the CPU has what is left
and what no GPU can reach, by its kernels' measured rate. Both use host memory; that they slow each other there is not
reckoned with, and where host memory is all that bounds them the split costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

from tiering.errors import PlacementError
from tiering.placement import place
from tiering.plan import Budgets, Tier, Workload
from tiering.planning.forecast import link_seconds, updated_on_device
from tiering.planning.rates import Rates

WORTH_A_WINDOW = 0.05  # smaller shares save less than the device memory is worth that they pass through


def best_share(load: Workload, budgets: Budgets, rates: Rates) -> float:
    """The share of state in host memory that should visit the GPU, in hundredths; 0 where a rate is not known.

    ``rates`` are those of one rank. Raises nothing: what has no plan has no share.
    """
    if load.device_is_host or rates.optimizer is None or rates.device_link is None:
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
    kept = sum(t.numel for t in plan.sub_groups if t.tier is not Tier.DEVICE and not t.visits)
    on_cpu, beside = elements / rates.optimizer, kept / rates.optimizer
    # share x on_device = (1 - share) x on_cpu + beside
    share = min(1.0, (on_cpu + beside) / (on_cpu + on_device)) if on_device else 1.0
    return round(share, 2) if share >= WORTH_A_WINDOW else 0.0
