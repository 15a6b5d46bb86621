"""Groups of one kind are counted together: a plan is that of groups which are looked at one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property

from hypothesis import given
from hypothesis import strategies as st

from tests.tiering.workloads import PLENTY, budgets, example, workloads
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.kinds import Kinds
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload


class OneByOne(Workload):
    """A Workload in which each group is a kind of its own."""

    @cached_property
    def kinds(self) -> Kinds[GroupSizes]:
        return Kinds(self.groups, range(len(self.groups)))


def repeated(load: Workload, times: int) -> Workload:
    """``load`` with all its groups as often, one model behind the other."""
    groups = []
    for first in range(0, times * len(load.groups), len(load.groups)):
        for group in load.groups:
            parent, beside = (None if at is None else first + at for at in (group.parent, group.beside))
            groups.append(replace(group, name=f"{group.name} from {first}", parent=parent, beside=beside))
    return replace(load, groups=tuple(groups))


def figures(load: Workload, limits: Budgets) -> object:
    """All that a plan of ``load`` says, or its refusal."""
    try:
        plan = make_plan(load, limits)
    except PlacementError as refusal:
        return str(refusal)
    placed = {each.name: getattr(plan, each.name) for each in fields(Plan) if each.name != "workload"}
    return (
        placed,
        [plan.contents(tier) for tier in Tier],
        plan.nvme_traffic_by_kind(),
        plan.updated(),
        plan.sent_bytes(),
        plan.frozen_swap_bytes,
    )


@given(
    load=workloads(),
    limits=budgets,
    times=st.integers(1, 3),
    ranks=st.sampled_from([1, 1, 2]),
    device=st.none() | st.just(PLENTY),
)
def test_a_plan_does_not_depend_on_what_is_counted_together(
    load: Workload, limits: Budgets, times: int, ranks: int, device: int | None
) -> None:
    load = replace(repeated(load, times), world_size=ranks)
    limits = Budgets(
        limits.device * times if device is None else device, limits.host * times, limits.nvme * times
    )
    apart = OneByOne(**{each.name: getattr(load, each.name) for each in fields(Workload)})
    assert figures(load, limits) == figures(apart, limits)


def test_equal_groups_are_one_kind_wherever_they_are() -> None:
    first, second, third = example().groups
    larger = replace(second, param_bytes=2 * second.param_bytes)
    load = example(groups=(first, larger, replace(third, parent=0)))
    # The first one encloses another, so it stays open for a whole backward.
    assert load.kinds.of == (0, 1, 2)
    assert example().kinds.of == (0, 0, 0) and example().alike == ((first, 3),)
    assert example(groups=(first, larger, third)).kinds.of == (0, 1, 0)
