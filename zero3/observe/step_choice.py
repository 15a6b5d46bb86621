"""The step that "auto" takes: by the rates that were measured on this machine, the same one on all ranks."""

from __future__ import annotations

import logging
import math

import torch

from tiering import _logs
from tiering.config.training import StepPolicy, TieringConfig
from tiering.placement.plan import Plan
from tiering.planning.step_choice import choices, choose, seconds_by_step, with_step
from zero3.observe.device_rates import saved_rates
from zero3.observe.disk_rate import saved_disk_rates
from zero3.ranks.collectives import Collectives

log = logging.getLogger(__name__)


def settle_step(
    plan: Plan,
    config: TieringConfig,
    device: torch.device,
    *,
    local_ranks: int,
    collectives: Collectives | None,
) -> Plan:
    """``plan`` with the step that "auto" takes; ``plan`` itself if the configuration names a step."""
    if config.tiering.step is not StepPolicy.AUTO:
        return plan
    seconds, steps = None, choices(plan, clips=bool(config.gradient_clipping))
    # All ranks of a partition have the same plan, and so the same choices.
    if len(steps) > 1:
        rates = saved_rates(plan.workload, device, local_ranks=local_ranks)
        rates = rates.updated(saved_disk_rates(config, local_ranks=local_ranks))
        seconds = seconds_by_step(plan, steps, rates, local_ranks=local_ranks)
    if len(steps) > 1 and collectives is not None:
        row = [math.inf if seconds is None else seconds[step] for step in steps]
        table = collectives.tables.table(
            torch.tensor(row, dtype=torch.float64, device="cpu"), "compare rates"
        )
        # Those of the slowest rank; none if a rank has no rates.
        slowest = table.amax(0).tolist()
        seconds = dict(zip(steps, slowest, strict=True)) if math.isfinite(max(slowest)) else None
    step = choose(steps, seconds)
    log.log(_logs.once(logging.INFO), "tiering.step 'auto' takes %r: %s", step.value, _reason(steps, seconds))
    return with_step(plan, step)


def _reason(steps: tuple[StepPolicy, ...], seconds: dict[StepPolicy, float] | None) -> str:
    if len(steps) == 1:
        return "the updates of this placement can only be made in step()"
    if seconds is None:
        return "it hides updates of this placement; run tiering plan --measure for a choice by rates"
    times = ", ".join(f"{seconds[step]:.3g} s {step.value}" for step in steps)
    return f"with as much compute as other work, a step takes {times}"
