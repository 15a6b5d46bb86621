"""Staging slots in seconds of NVMe transfers: they grow if much is on NVMe."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiering.workloads import MIB, NVME, PLENTY, budgets, example, followed, workloads
from tiering.errors import PlacementError
from tiering.placement import slots
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan, place
from tiering.placement.plan import Budgets, Plan
from tiering.placement.slots import (
    FEW_BYTES,
    GROWN_SLOTS,
    GROWTH_SHARE,
    MOST_SLOTS,
    SMALLEST_TILE,
    STAGING_SHARE,
    USUAL_SLOTS,
    USUAL_TILE,
)
from tiering.placement.workload import DiskRate, Workload

GIB = 1 << 30


def large(rate: float | None, **changes: object) -> Workload:
    """80 blocks of 100 Mi elements: 125 GiB that may be on NVMe."""
    groups = tuple(GroupSizes(f"layers.{i}", 2 * 100 * MIB, 100 * MIB) for i in range(80))
    load = example(
        groups=groups,
        cache_in_host=True,
        sub_group_numel=10**9,
        staged_seconds=0.1,
        staged_numel=16 << 20,
        disk=None if rate is None else DiskRate(int(rate), assumed=False),
    )
    return replace(load, **changes)


def plan_of(load: Workload, host: int = 32 * GIB, nvme: int = PLENTY) -> Plan:
    return make_plan(load, Budgets(4 * GIB, host, nvme))


@pytest.mark.parametrize(("rate", "tile"), [(3e9, 2), (5e9, 2), (20e9, 4), (50e9, 16)])
@pytest.mark.parametrize("cache", [True, False])
def test_slots_cover_the_seconds_and_tiles_grow_with_them(rate: float, tile: int, cache: bool) -> None:
    plan = plan_of(large(rate, cache_in_host=cache))
    goal, slot = 0.1 * rate, plan.staging.slot_bytes
    assert goal - slot < plan.staging.nbytes < goal + slot
    assert USUAL_SLOTS < plan.staging.slots <= MOST_SLOTS
    assert tile == 2 or plan.staging.slots >= GROWN_SLOTS
    assert tile * MIB / 2 < max(run.largest for run in plan.runs) <= tile * MIB


@pytest.mark.parametrize("host", [2, 3, 6, 12, 48, 96])
def test_slots_take_a_third_of_the_host_budget_and_cost_a_step_little(host: int) -> None:
    """However fast the drives are."""
    load = large(1e12, staged_seconds=10.0)
    plan, usual = plan_of(load, host * GIB), plan_of(replace(load, disk=None), host * GIB)
    assert plan.staging.nbytes <= host * GIB / STAGING_SHARE
    moved, least = sum(plan.nvme_traffic()), sum(usual.nvme_traffic())
    assert least <= moved <= least * (1 + 1 / GROWTH_SHARE)
    assert plan.staging.nbytes > 3 * usual.staging.nbytes or host == 2


def test_with_little_on_nvme_the_slots_are_the_usual_ones() -> None:
    few = FEW_BYTES // (200 * MIB * 8)
    load = replace(large(50e9), groups=large(None).groups[:few])
    plan, usual = plan_of(load, GIB), plan_of(replace(load, disk=None), GIB)
    assert sum(plan.nvme_traffic()) > 0
    assert (plan.staging, plan.runs) == (usual.staging, usual.runs)
    assert max(run.largest for run in plan.runs) <= USUAL_TILE


def test_a_plan_never_fails_because_of_larger_staging() -> None:
    load = large(50e9)
    usual, larger = plan_of(replace(load, disk=None)), plan_of(load)
    assert usual.total(NVME) < larger.total(NVME)
    for enough, same in ((usual, usual), (larger, larger)):
        tight = plan_of(load, nvme=enough.total(NVME))
        assert (tight.staging, tight.runs, tight.workload) == (same.staging, same.runs, load)
    with pytest.raises(PlacementError, match="nvme needs"):
        plan_of(load, nvme=usual.total(NVME) - 4096)


@settings(deadline=None, max_examples=40)
@given(
    load=workloads(),
    limits=budgets,
    rate=st.sampled_from([10**5, 10**7, 10**9]),
    sub_group_numel=st.sampled_from([1, 10**9]),
)
def test_budgets_that_are_enough_with_the_usual_slots_are_enough(
    load: Workload, limits: Budgets, rate: int, sub_group_numel: int
) -> None:
    larger = replace(
        load,
        staged_seconds=1.0,
        staged_numel=16 << 20,
        sub_group_numel=sub_group_numel,
        disk=DiskRate(rate, assumed=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        # The groups are small, and so is what streams.
        patch.setattr(slots, "FEW_BYTES", 64 << 10)
        patch.setattr(slots, "USUAL_TILE", 2 * SMALLEST_TILE)
        enough = followed(replace(larger, disk=None), limits).budgets
        assert place(larger, enough).workload == larger


def test_keys_bound_the_slots() -> None:
    none = plan_of(large(50e9, staged_seconds=0.0))
    assert none.staging == plan_of(large(None)).staging
    assert plan_of(large(50e9, staged_seconds=0.05)).staging.nbytes < 0.051 * 50e9
    # More slots of a smaller size, up to the limit.
    small = plan_of(large(50e9, staged_numel=MIB))
    assert (max(run.largest for run in small.runs), small.staging.slots) == (MIB, MOST_SLOTS)
    # Not more slots than there are tiles.
    two = replace(large(50e9, staged_seconds=10.0, cache_in_host=False), groups=large(None).groups[:2])
    assert plan_of(two).staging.slots == 2 * -(-100 // 16)


def test_equal_inputs_give_equal_plans_and_the_plan_names_its_rate() -> None:
    assert plan_of(large(5e9)) == plan_of(large(5e9))
    measured, assumed = plan_of(large(5e9)), plan_of(large(None, disk=DiskRate(5 * 10**9, assumed=True)))
    assert measured.staging == assumed.staging
    figures = assumed.staging_figures()
    assert figures is not None
    assert figures == {
        "slots": assumed.staging.slots,
        "slot_bytes": assumed.staging.slot_bytes,
        "seconds": assumed.staging.nbytes / 5e9,
        "bytes_per_second": 5 * 10**9,
        "assumed": True,
    }
    line = f"cover {1e3 * assumed.staging.nbytes / 5e9:.3g} ms of NVMe at 4.66 GiB/s"
    flat = [" ".join(str(plan).split()) for plan in (measured, assumed)]
    assert f"{line} (assumed: tiering plan --measure DIR measures it)" in flat[1]
    assert line in flat[0] and "assumed" not in flat[0]
    # Everything fits into host memory: nothing passes through slots to NVMe.
    assert plan_of(large(5e9), host=1000 * GIB).staging_figures() is None
