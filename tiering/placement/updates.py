"""When a step updates each part of a plan, and what is hidden for that. Pure."""

from __future__ import annotations

from tiering.config.step_policy import StepPolicy
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.plan import Plan, TileRun
from tiering.placement.workload import Tier, Workload


def update_of(plan: Plan, run: TileRun) -> StepPolicy:
    """When a step updates the tiles of ``run``.

    Groups that can be read without a call that the engine sees are updated in ``step()``: parameters that stay, whole
    copies on each rank, and experts of a fused parameter. If the step may be taken back, so is what has no second
    version, and cannot be restored.
    """
    load, group, param = plan.workload, plan.workload.groups[run.group], plan.param_tiers[run.group]
    if load.step is StepPolicy.AFTER or load.is_irrevocable:
        return load.step
    hides = hides_in_place(load, group, param, run.tier)
    if (load.computes_in_place(group, param) and not hides) or group.expert_bytes:
        return StepPolicy.AFTER
    can_go_back = hides or param is run.tier is Tier.NVME
    return load.step if can_go_back or load.step is StepPolicy.DEFERRED else StepPolicy.AFTER


def hides_in_place(load: Workload, group: GroupSizes, param: Tier, state: Tier) -> bool:
    """Whether ``group`` computes from host memory and shows its parameters only while it is used.

    So a part of it, whose optimizer state lives on ``state``, can be updated between two uses, as one that is fetched
    can. Its bytes stay where they are. A step in backward may be taken back: then parameters are restored from the
    masters in the state, which has two versions.
    """
    can_restore = state is Tier.NVME and load.versions > 1 and not load.of(group).steps_need_params
    return (
        (load.step is StepPolicy.DEFERRED or (load.step is StepPolicy.IN_BACKWARD and can_restore))
        # A GPU always fetches by copy.
        and not load.fetch_by_copy
        and load.world_size == 1
        and param is Tier.HOST
        and group.trainable_numel > 0
        and not group.expert_bytes
    )


def hidden_groups(plan: Plan) -> frozenset[int]:
    """The indices of the groups of which a part ``hides_in_place``."""
    load = plan.workload
    return frozenset(
        run.group
        for run in plan.runs
        if hides_in_place(load, load.groups[run.group], plan.param_tiers[run.group], run.tier)
    )
