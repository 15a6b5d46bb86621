"""The ds_config.json of a plan, with budgets as the plan has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiering.placement.workload import Tier
from tiering.planning.plan_report import PlanReport

# Keys of ``tiering`` with bytes.
_SIZES = ("tile", "activation_budget", *(f"{tier.value}_budget" for tier in Tier))
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


def file_of(report: PlanReport, usual: Mapping[str, Any]) -> dict[str, Any]:
    """The file ``usual`` with what ``report`` has besides, in the keys of ``tiering``.

    ``--config`` with this file and the same run has the same plan. Budgets are those of a node, of all its ranks. Those
    of this machine stay "auto".
    """
    config, local_ranks = report.request.config, report.setting.local_size
    tiers = config.tiering.model_dump(mode="json", exclude_unset=True)
    counted = report.setting.gpu_memory is not None and report.activations is not None
    for tier in Tier:
        key = f"{tier.value}_budget"
        if tier in report.needed or (tier is Tier.DEVICE and counted) or key in tiers:
            tiers[key] = report.budgets.of(tier) * local_ranks
    sizes = {key: _size(value) for key, value in tiers.items() if key in _SIZES and value != "auto"}
    accumulated = config.gradient_accumulation_steps
    passes = {} if accumulated == 1 else {"gradient_accumulation_steps": accumulated}
    return {**usual, **passes, "tiering": tiers | sizes}


def _size(nbytes: int) -> str | int:
    """``nbytes`` in the largest unit in which it is a whole number."""
    for unit, each in _UNITS.items():
        if nbytes and nbytes % each == 0:
            return f"{nbytes // each}{unit}"
    return nbytes
