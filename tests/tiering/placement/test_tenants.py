"""A tenant that no code of the engine knows: placed by its traffic, within budgets, named where it has no room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiering.workloads import DEVICE, HOST, NUMEL, NVME, PLENTY, example, followed
from tiering.errors import PlacementError
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.tenants import tenants
from tiering.placement.workload import Tenant, TenantPiece, Tier, Workload
from tiering.storage.arena import PAGE

NBYTES = 16 * 4096


def with_keys(load: Workload, *, moved: int, tier: Tier = NVME, pieces: int = 3) -> Workload:
    """``load`` and a tenant whose pieces are each read ``moved`` times in a step, and written once."""
    piece = TenantPiece(NBYTES, tier, moved * NBYTES, NBYTES)
    return replace(load, others=(Tenant("cached keys", (piece,) * pieces, offloaded=True),))


def test_the_list_has_the_tenants_of_the_engine_and_the_others() -> None:
    listed = tenants(with_keys(example(), moved=1))
    assert [tenant.kind for tenant in listed] == ["parameters", "gradients", "optimizer state", "cached keys"]
    assert [len(tenant.pieces) for tenant in listed] == [3, 3, 3, 3]


def test_its_bytes_and_its_traffic_are_in_the_plan() -> None:
    load = with_keys(example(), moved=2)
    with_it, without = (
        make_plan(each, Budgets(PLENTY, PLENTY, PLENTY)) for each in (load, replace(load, others=()))
    )
    read, written = with_it.nvme_traffic_by_kind()
    assert (read["cached keys"], written["cached keys"]) == (6 * NBYTES, 3 * NBYTES)
    assert with_it.contents(NVME) == {**without.contents(NVME), "cached keys": 3 * NBYTES}
    assert with_it.total(HOST) == without.total(HOST) + 2 * NBYTES  # its window
    assert "cached keys 192.00 KiB" in str(with_it)
    published = {tier.name: tier.by_kind for tier in with_it.status(0).tiers}
    assert published["nvme"]["cached keys"] == 3 * NBYTES


def test_host_memory_goes_to_it_or_to_state_by_traffic_per_byte() -> None:
    """State moves twice per byte. The tenant moves four times, or once."""
    kept = []
    for moved in (3, 0):
        load = with_keys(example(offload_param=HOST, cache_in_host=True), moved=moved)
        streams = make_plan(replace(load, cache_in_host=False), Budgets(PLENTY, PLENTY, PLENTY))
        assert streams.contents(NVME) == {"cached keys": 3 * NBYTES, "optimizer state": 3 * 12 * NUMEL}
        kept.append(make_plan(load, Budgets(PLENTY, streams.total(HOST) + 3 * NBYTES, PLENTY)).contents(HOST))
    before, after = kept
    assert before["cached keys"] == 3 * NBYTES and "cached keys" not in after
    assert 0 < before["optimizer state"] < after["optimizer state"] < 3 * 12 * NUMEL


def test_a_window_is_kept_for_what_may_not_be_cached() -> None:
    """One piece would fit into its own window, but ``cache_in_host`` keeps it out of host memory."""
    load = with_keys(example(offload_param=DEVICE, cache_in_host=False), moved=1, pieces=1)
    least = followed(load, Budgets(PLENTY, 0, PLENTY))
    assert least.contents(NVME)["cached keys"] == NBYTES and least.windows["cached keys"] == 2 * NBYTES
    assert least.total(HOST) <= least.budgets.host


def test_with_room_for_all_nothing_streams_and_no_window_is_planned() -> None:
    plan = make_plan(with_keys(example(cache_in_host=True), moved=1), Budgets(PLENTY, PLENTY, PLENTY))
    assert plan.contents(NVME) == {}
    assert plan.contents(HOST)["cached keys"] == 3 * NBYTES
    assert plan.windows["cached keys"] == 0


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_a_refusal_names_it_with_its_bytes(tier: Tier) -> None:
    load = with_keys(example(), moved=1, tier=tier, pieces=1000)
    with pytest.raises(PlacementError, match=r"cached keys 62\.50 MiB.*raise " + tier.value):
        make_plan(load, replace(Budgets(PLENTY, PLENTY, PLENTY), **{tier.value: 50 << 20}))


def test_more_host_memory_is_never_refused_beside_swap_space_that_always_exists() -> None:
    """Everything else may fit into host memory, but not beside the checksums of that swap space."""
    swapped = Tenant("cached keys", (TenantPiece(512 * NBYTES, NVME, fixed=True),))
    load = replace(example(cache_in_host=True, verified_files=1), others=(swapped,))
    whole = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).total(HOST)
    accepted = []
    for host in range(0, whole + 64 * PAGE, PAGE):
        try:
            accepted.append(make_plan(load, Budgets(PLENTY, host, PLENTY)).total(HOST) <= host)
        except PlacementError:
            accepted.append(False)
    assert accepted == sorted(accepted) and True in accepted and False in accepted
