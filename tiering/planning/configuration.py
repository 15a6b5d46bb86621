"""The ds_config.json of a plan, with budgets as the plan has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiering.placement.workload import Tier
from tiering.planning.fit import Remedy
from tiering.planning.plan_report import PlanReport
from tiering.planning.setting import Setting

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
    sizes = {key: size_text(value) for key, value in tiers.items() if key in _SIZES and value != "auto"}
    accumulated = config.gradient_accumulation_steps
    passes = {} if accumulated == 1 else {"gradient_accumulation_steps": accumulated}
    tokens, sequence = report.setting.tokens, report.setting.sequence
    # Without a length, a micro-batch is one sequence, as in ``usual``.
    rows = {} if sequence is None else {"train_micro_batch_size_per_gpu": tokens // sequence}
    return {**usual, **rows, **passes, "tiering": tiers | sizes}


def size_text(nbytes: int) -> str | int:
    """``nbytes`` in the largest unit in which it is a whole number."""
    for unit, each in _UNITS.items():
        if nbytes and nbytes % each == 0:
            return f"{nbytes // each}{unit}"
    return nbytes


# The option of ``tiering plan`` for each change of a remedy that one makes.
_OPTIONS = {
    **{f"tiering.{tier.value}_budget": f"--{tier.value}-budget" for tier in Tier},
    "tiering.tile": "--tile",
    "tiering.activations": "--activations",
    "tiering.activation_budget": "--activation-budget",
    "tiering.state": "--state",
    "gpu": "--gpu",
    "tokens": "--tokens",
    "sequence": "--sequence",
    "checkpointing": "--checkpointing",
    "loss_chunk": "--chunked-loss",
    "ranks": "--ranks",
}


def options_of(remedy: Remedy, setting: Setting) -> list[str] | None:
    """The options that add ``remedy`` to a command for ``setting``; None if a part of it has no option.

    Each of so many more ranks has the budgets of the ``remedy``: they are those of a node with as many ranks.
    """
    options = []
    for key, value in remedy.change.items():
        if key not in _OPTIONS:
            return None
        option = _OPTIONS[key]
        if option in ("--checkpointing", "--chunked-loss"):
            options.append(option)
        elif isinstance(value, int) and (key == "gpu" or key.removeprefix("tiering.") in _SIZES):
            options.append(f"{option}={size_text(value)}")
        else:
            options.append(f"{option}={value}")
    if "ranks" in remedy.change:
        nodes = int(remedy.change["ranks"]) // setting.local_size
        budgets = {tier: remedy.budgets.of(tier) * setting.local_size for tier in (Tier.HOST, Tier.NVME)}
        options.append(f"--nodes={nodes}")
        options += [f"--{tier.value}-budget={size_text(nbytes)}" for tier, nbytes in budgets.items()]
    return options
