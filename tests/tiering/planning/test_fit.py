"""What would make a model fit: every offer does, and the least budget is the least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.tiering.workloads import DEVICE, HOST, MIB, NUMEL, PLENTY, budgets, example, workloads
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.workload import Tier, Workload
from tiering.planning.fit import least_budget, of_ranks, remedies
from tiering.storage.arena import PAGE

ALL = Budgets(PLENTY, PLENTY, PLENTY)


@settings(deadline=None, max_examples=60)
@given(load=workloads(), limits=budgets)
def test_every_offer_fits_and_just_below_the_least_budget_does_not(load: Workload, limits: Budgets) -> None:
    offers = remedies(load, limits)
    try:
        make_plan(load, limits)
    except PlacementError:
        assert offers, "what does not fit has a remedy"
    else:
        assert offers == []
    for offer in offers:
        plan = make_plan(offer.workload, offer.budgets)
        for tier in Tier:
            assert plan.total(tier) <= offer.budgets.of(tier)
            if f"tiering.{tier.value}_budget" in offer.change:
                below = replace(offer.budgets, **{tier.value: offer.budgets.of(tier) - PAGE})
                with pytest.raises(PlacementError):
                    make_plan(offer.workload, below)


@pytest.mark.parametrize("tier", Tier)
def test_the_least_budget_of_a_tier_alone_is_that_of_a_plan(tier: Tier) -> None:
    load = example(offload_param=tier, offload_optimizer=tier, device_is_host=tier is not HOST)
    least = least_budget(load, ALL, tier)
    assert least is not None
    assert make_plan(load, least).total(tier) == least.of(tier)
    assert replace(least, **{tier.value: PLENTY}) == ALL


def test_no_budget_of_one_tier_replaces_another() -> None:
    nothing = Budgets(0, 0, PLENTY)
    assert least_budget(example(), nothing, HOST) is None
    (together,) = remedies(example(), nothing)
    assert together.change == {
        "tiering.device_budget": 2 * NUMEL,  # one group while it computes
        "tiering.host_budget": together.budgets.host,
    }
    assert together.budgets.host > 0
    assert str(together).startswith("device_budget of 32.00 KiB, host_budget of ")


def test_budgets_are_told_for_all_ranks_of_the_node() -> None:
    ranked = replace(of_ranks(example(), 2), stage=3)
    limits = replace(ALL, host=0)
    offers = remedies(ranked, limits, local_ranks=2)
    (raised,) = (offer for offer in offers if "tiering.host_budget" in offer.change)
    least = least_budget(ranked, limits, HOST)
    assert least is not None
    assert raised.change == {"tiering.host_budget": 2 * least.host}
    assert (
        str(raised)
        == f"host_budget of {2 * least.host >> 10}.00 KiB ({least.host >> 10}.00 KiB for each rank)"
    )


def test_smaller_formats_of_state_and_gradients_are_offered() -> None:
    load = example(offload_optimizer=DEVICE, offload_param=DEVICE, can_split=True, grad_itemsize=4)
    needed = make_plan(load, ALL).total(DEVICE)
    assert needed == 3 * NUMEL * (2 + 4 + 12)
    offers = {
        tuple(offer.change.items()): str(offer) for offer in remedies(load, replace(ALL, device=needed - 1))
    }
    assert offers[(("tiering.grad_accum_dtype", "bf16"),)] == "grad_accum_dtype 'bf16'"
    assert [key for key in offers if key[0][0] == "tiering.state"] == [
        (("tiering.state", "bf16"),),
        (("tiering.state", "split"),),
        (("tiering.state", "split+bf16"),),
    ]
    assert (("tiering.device_budget", needed),) in offers


def test_a_slower_tier_is_offered_with_the_least_step_down() -> None:
    """Only as much leaves the device as has to: optimizer state to host memory, and no parameters."""
    load = example(
        offload_optimizer=DEVICE, offload_param=DEVICE, stage=3, device_is_host=False, fetch_by_copy=True
    )
    offers = remedies(load, Budgets(8 * 2 * NUMEL, PLENTY, 0))
    moved = [dict(offer.change) for offer in offers if any("offload" in key for key in offer.change)]
    assert moved == [{"zero_optimization.offload_optimizer.device": "cpu"}]


def test_nvme_is_offered_with_the_budget_that_it_needs() -> None:
    largest = 4 * MIB
    groups = tuple(GroupSizes(f"layers.{i}", largest, largest // 2) for i in range(20))
    load = example(
        groups=groups,
        offload_optimizer=HOST,
        offload_param=HOST,
        cache_in_host=True,
        sub_group_numel=MIB,
        stage=3,
    )
    offers = remedies(load, Budgets(2 * largest, 40 * largest, 0))
    (moved,) = (offer for offer in offers if any("offload" in key for key in offer.change))
    assert moved.change == {
        "zero_optimization.offload_optimizer.device": "nvme",
        "tiering.nvme_budget": moved.budgets.nvme,
    }
    assert 0 < moved.budgets.nvme <= 20 * (largest // 2) * (12 + 2)


def test_more_ranks_are_offered_where_they_share() -> None:
    load = example(offload_optimizer=HOST, offload_param=HOST, stage=3)
    whole = make_plan(load, ALL).total(HOST)
    limits = replace(ALL, host=whole // 3)
    (more,) = (offer for offer in remedies(load, limits) if "ranks" in offer.change)
    assert more.change == {"ranks": 4}
    assert str(more) == "4 ranks, each with these budgets"
    alike = remedies(replace(load, stage=0), limits)
    assert not [offer for offer in alike if "ranks" in offer.change]


def test_of_more_ranks_each_group_is_padded_to_equal_shards() -> None:
    groups = (GroupSizes("mixed", 2 * (3 + 2) * 2048, 3 * 2048), GroupSizes("frozen", 2 * 2048, 0))
    load = of_ranks(example(groups=groups), 4)
    assert load.world_size == 4
    assert [(group.trainable_numel, group.param_bytes) for group in load.groups] == [
        (4 * 4096, 2 * (4 + 4) * 4096),
        (0, 2 * 4 * 4096),
    ]


def test_stage_3_is_offered_to_ranks_that_keep_whole_parameters() -> None:
    groups = tuple(GroupSizes(f"layers.{i}", 2 * NUMEL, NUMEL) for i in range(20))
    sharded = of_ranks(example(groups=groups, offload_param=DEVICE, offload_optimizer=DEVICE), 4)
    needed = replace(ALL, device=make_plan(sharded, ALL).total(DEVICE))
    offers = remedies(replace(sharded, stage=1), needed)
    assert {"zero_optimization.stage": 3} in [dict(offer.change) for offer in offers]


def test_an_optimizer_without_a_kernel_stays_whole_on_the_device() -> None:
    load = example(offload_param=DEVICE, offload_optimizer=DEVICE, whole_groups=True, grad_itemsize=4)
    offers = remedies(load, replace(ALL, device=PAGE))
    assert [list(offer.change) for offer in offers] == [["tiering.device_budget"]]
