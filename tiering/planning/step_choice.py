"""The step of "auto": the fastest one with which a training loop sees the same as with a step after backward. Pure.

A deferred step is such a step, and so is one in backward that can be taken back. With one version in swap space, a step
in backward asks more of a loop, so it has to be asked for by name. The placement is the same for all that remain.
With clipping it has to be asked for, too: a clipped step is made again, and how many are clipped is not known before.

The tokens of a micro-batch are not known when an engine starts. So steps are compared with as much compute as a step
after backward has other work: with more or less compute they differ less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiering.config.step_policy import StepPolicy
from tiering.errors import ConfigError
from tiering.placement.plan import Plan
from tiering.placement.updates import hidden_groups, update_of
from tiering.planning.forecast import MachinePart, forecast
from tiering.planning.rates import Rates

STEPS = (StepPolicy.AFTER, StepPolicy.DEFERRED, StepPolicy.IN_BACKWARD)
# Fraction of a step's time. For a smaller gain an earlier one of STEPS is taken.
WORTH_A_CHANGE = 0.05
# The network carries the same bytes with each step: without its rate it takes no time.
_FREE = 1e30


def with_step(plan: Plan, step: StepPolicy) -> Plan:
    """``plan`` with another ``step``, if neither is irrevocable: both have this placement."""
    return replace(plan, workload=replace(plan.workload, step=step))


def choices(plan: Plan, *, clips: bool) -> tuple[StepPolicy, ...]:
    """The steps among which "auto" chooses: AFTER, and those with which something is updated elsewhere.

    ``clips``: gradients are clipped. No step that hides parameters: a loop may read them where they are.
    """
    load = plan.workload
    if load.whole_groups:
        return (StepPolicy.AFTER,)

    def is_choice(step: StepPolicy) -> bool:
        stepped = with_step(plan, step)
        has_effect = any(update_of(stepped, run) is step for run in plan.runs)
        return step is StepPolicy.AFTER or (has_effect and not hidden_groups(stepped))

    steps = STEPS[:2] if clips or load.versions == 1 else STEPS
    return tuple(filter(is_choice, steps))


def seconds_by_step(
    plan: Plan, steps: Sequence[StepPolicy], rates: Rates, *, local_ranks: int
) -> dict[StepPolicy, float] | None:
    """The time of a step with each of ``steps``, at the node's ``rates``; None if one is missing."""
    rates = replace(rates, flops=1.0, network=rates.network or _FREE)
    after = with_step(plan, StepPolicy.AFTER)
    try:
        others = forecast(after, rates, tokens=0, local_ranks=local_ranks).seconds
        compute = forecast(after, replace(rates, device_memory=None), tokens=1, local_ranks=local_ranks)
        operations = sum(phase.busy[MachinePart.COMPUTE] for phase in compute.phases)
        if not others or not operations:
            return None
        rates = replace(rates, flops=operations / others)
        return {
            step: forecast(with_step(plan, step), rates, tokens=1, local_ranks=local_ranks).seconds
            for step in steps
        }
    except ConfigError:
        return None


def choose(steps: Sequence[StepPolicy], seconds: Mapping[StepPolicy, float] | None) -> StepPolicy:
    """The one of ``steps``, the choices, that "auto" takes: by the ``seconds`` of each, or without them by a rule.

    The rule is a deferred step, if it has an effect: as a whole it is never slower than a step after backward.
    """
    if seconds is None:
        return steps[1] if len(steps) > 1 else steps[0]
    enough = (1 + WORTH_A_CHANGE) * min(seconds.values())
    return next(step for step in steps if seconds[step] <= enough)
