"""Plans of small workloads: traffic as counted by hand, what is kept first, what is refused, what the table shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.tiering.workloads import DEVICE, HOST, MIB, NUMEL, NVME, PLENTY, example, followed
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Staging
from tiering.placement.slots import FEWEST_SLOTS, MOST_TILES, SMALLEST_TILE, USUAL_SLOTS
from tiering.placement.workload import Workload


def traffic_per_param(load: Workload, host: int = PLENTY) -> tuple[float, float]:
    read, written = make_plan(load, Budgets(PLENTY, host, PLENTY)).nvme_traffic()
    numel = sum(group.trainable_numel for group in load.groups)
    return read / numel, written / numel


def test_traffic_of_parameters_and_state() -> None:
    # read: parameters twice, state of 12 bytes; written: the updated parameter and the state
    assert traffic_per_param(example()) == (2 + 2 + 12, 2 + 12)  # 30 in all


def test_traffic_of_state_only() -> None:
    assert traffic_per_param(example(offload_param=HOST)) == (12, 12)  # 24 in all


def test_traffic_of_parameters_only() -> None:
    assert traffic_per_param(example(offload_optimizer=HOST)) == (4, 2)


def test_traffic_grows_with_micro_batches_by_parameters_and_gradients_only() -> None:
    assert traffic_per_param(example(micro_batches=3)) == (3 * 4 + 12, 2 + 12)


def test_traffic_of_fp32_compute() -> None:
    """The parameter is the master: read twice by compute and once by the step, and no second copy of it."""
    load = example(compute_itemsize=4, groups=tuple(GroupSizes(f"g{i}", 4 * NUMEL, NUMEL) for i in range(3)))
    assert load.state_itemsize == 8
    assert traffic_per_param(load) == (4 + 4 + 4 + 8, 4 + 8)
    assert traffic_per_param(replace(load, offload_param=HOST)) == (8, 8)


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_state_is_counted_by_the_tensors_that_the_update_rule_keeps(moments: int) -> None:
    state = 4 * moments
    load = example(state_tensors=moments)
    assert make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).contents(NVME) == {
        "parameters": 3 * 2 * NUMEL,
        "optimizer state": 3 * (4 + state) * NUMEL,
    }
    assert traffic_per_param(load) == (2 + 2 + 4 + state, 2 + 4 + state)
    groups = tuple(GroupSizes(f"g{i}", 4 * NUMEL, NUMEL) for i in range(3))
    in_fp32 = replace(load, compute_itemsize=4, groups=groups)
    assert traffic_per_param(in_fp32) == (4 + 4 + 4 + state, 4 + state)
    slot = make_plan(in_fp32, Budgets(PLENTY, PLENTY, PLENTY)).staging.slot_bytes
    assert slot == SMALLEST_TILE * (state + 4)  # gradients stay in memory


def test_a_group_in_fp32_among_others_in_16_bits() -> None:
    """Its parameters are the masters, as in a model in fp32; a slot has room for the largest of each kind."""
    first, *others = example().groups
    load = example(
        groups=(replace(first, param_bytes=4 * NUMEL, fp32=True), *others), state_tensors=2, split=True
    )
    plan = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
    assert plan.contents(NVME) == {
        "parameters": (4 + 2 + 2) * NUMEL,
        "optimizer state": (8 + 10 + 10) * NUMEL,
    }
    assert plan.contents(HOST)["gradients"] == (4 + 2 + 2) * NUMEL
    tile = plan.sub_groups[0].numel
    assert (plan.staging.param_offset, plan.staging.grad_offset, plan.staging.slot_bytes) == (
        10 * tile,
        (10 + 4) * tile,
        (10 + 4) * tile,
    )
    read, written = plan.nvme_traffic_by_kind()
    assert read["parameters"] == (3 * 4 + 2 * 3 * 2) * NUMEL
    assert written["parameters"] == (4 + 2 + 2) * NUMEL


def test_without_any_state_nothing_is_staged() -> None:
    """SGD in fp32 whose parameters stay in memory: offloading its state asks for nothing at all."""
    groups = tuple(GroupSizes(f"g{i}", 4 * NUMEL, NUMEL) for i in range(3))
    load = example(compute_itemsize=4, groups=groups, state_tensors=0, offload_param=HOST)
    plan = make_plan(load, Budgets(PLENTY, PLENTY, 0))
    assert (plan.total(NVME), plan.nvme_traffic(), plan.staging) == (0, (0, 0), Staging())
    assert plan.contents(HOST) == {"parameters": 3 * 4 * NUMEL, "gradients": 3 * 2 * NUMEL}


def test_a_share_of_the_state_stays_on_the_device_with_its_gradients() -> None:
    """The first groups stay, with gradients and state, as far as they fit; the others may go to NVMe."""
    sizes = (2 * NUMEL, 4 * NUMEL, NUMEL, 3 * NUMEL)
    groups = tuple(GroupSizes(f"g{i}", 2 * size, size) for i, size in enumerate(sizes))
    tiers = {
        0.0: (0, 1, 2, 3),
        0.3: (0, 1, 2),
        0.35: (0, 1),
        0.5: (0, 2),  # 5 may stay; g1 would make it 6
        0.85: (2,),
        1.0: (),
    }
    for ratio, expected in tiers.items():
        load = example(groups=groups, offload_param=DEVICE, offload_ratio=ratio)
        plan = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
        stays = sum(sizes[i] for i in expected)
        assert plan.contents(DEVICE) == {
            kind: nbytes
            for kind, nbytes in (
                ("parameters", 2 * sum(sizes)),
                ("gradients", 2 * stays),
                ("optimizer state", 12 * stays),
            )
            if nbytes
        }, ratio
        on_device = {tile.group for tile in plan.sub_groups if tile.tier is DEVICE}
        assert on_device == set(expected), ratio
        assert plan.nvme_traffic() == (12 * (sum(sizes) - stays),) * 2


def test_state_that_stays_on_the_device_leaves_less_room_to_fetch_ahead() -> None:
    load = example(offload_ratio=0.0, prefetch_bytes=PLENTY)
    stays = 3 * NUMEL * (2 + 12)
    for groups_at_once in (1, 2, 3):
        device = stays + groups_at_once * 2 * NUMEL
        assert make_plan(load, Budgets(device, PLENTY, PLENTY)).working_bytes == groups_at_once * 2 * NUMEL
    with pytest.raises(PlacementError, match=r"raise device_budget to at least 704\.00 KiB"):
        make_plan(load, Budgets(stays, PLENTY, PLENTY))


def test_what_no_ratio_lets_leave_is_not_copied_out() -> None:
    load = example(
        offload_param=DEVICE,
        offload_optimizer=HOST,
        device_is_host=False,
        fetch_by_copy=True,
        offload_ratio=0.0,
    )
    plan = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
    assert not load.steps_copy_out
    assert (plan.total(HOST), plan.total(NVME)) == (0, 0)
    leaving = make_plan(replace(load, offload_ratio=0.5), Budgets(PLENTY, PLENTY, PLENTY))
    assert leaving.offload_window_bytes == 2 * 2 * NUMEL
    assert leaving.staging.slots >= FEWEST_SLOTS


@pytest.mark.parametrize(
    ("host", "sub_group_numel", "sizes"),
    [
        (0, 1 << 30, {10: 64}),  # as small as it gets unasked
        (PLENTY, 1 << 30, {640: 1}),
        (PLENTY, 300 * SMALLEST_TILE, {214: 2, 212: 1}),  # not 300, 300 and 40
        (0, 7 * SMALLEST_TILE, {7: 91, 3: 1}),  # more than are usual if they are asked for
        (0, 1, {1: 640}),
    ],
)
def test_a_group_is_cut_into_the_fewest_even_tiles(
    host: int, sub_group_numel: int, sizes: dict[int, int]
) -> None:
    numel = 10 * MOST_TILES * SMALLEST_TILE
    groups = (GroupSizes("large", 2 * numel, numel), GroupSizes("small", 2 * NUMEL, NUMEL))
    load = example(groups=groups, cache_in_host=False, sub_group_numel=sub_group_numel)
    plan = followed(load, Budgets(PLENTY, host, PLENTY))
    tiles = [tile.numel // SMALLEST_TILE for tile in plan.sub_groups if tile.group == 0]
    assert Counter(tiles) == sizes
    assert plan.staging.slot_bytes == max(tiles) * SMALLEST_TILE * (12 + 2 + 2 * (NVME in plan.grad_tiers))


@pytest.mark.parametrize("quanta", [63, 65, 127, 128, 129, 6399])
def test_no_group_has_more_tiles_than_are_usual(quanta: int) -> None:
    numel = quanta * SMALLEST_TILE
    load = example(groups=(GroupSizes("large", 2 * numel, numel),), sub_group_numel=1 << 30)
    tiles = followed(load, Budgets(PLENTY, 0, PLENTY)).sub_groups
    assert MOST_TILES // 2 < len(tiles) <= MOST_TILES


def test_whole_groups_are_one_tile_each() -> None:
    groups = (GroupSizes("large", 2 * 6 * MIB, 6 * MIB), GroupSizes("small", 2 * NUMEL, NUMEL))
    load = example(groups=groups, offload_param=DEVICE, offload_optimizer=DEVICE)
    tiles = make_plan(replace(load, whole_groups=True), Budgets(PLENTY, PLENTY, PLENTY)).sub_groups
    assert [(tile.group, tile.start, tile.end) for tile in tiles] == [(0, 0, 6 * MIB), (1, 0, NUMEL)]
    assert len(make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).sub_groups) > 2


def test_traffic_of_gradients_that_spill() -> None:
    load = example(micro_batches=2)
    staging = FEWEST_SLOTS * SMALLEST_TILE * (12 + 2 + 2)
    tight = staging + 2 * 2 * NUMEL  # the windows and nothing else
    assert traffic_per_param(load, tight) == (2 * 4 + 12 + 2 * 2, 2 + 12 + 2 * 2)
    with pytest.raises(PlacementError) as caught:
        make_plan(load, Budgets(PLENTY, tight - 1, PLENTY))
    assert str(caught.value) == (
        f"[TIER-PLAN] host needs at least {tight / 1024:.2f} KiB but its budget is {(tight - 1) / 1024:.2f} KiB"
        " (staging 96.00 KiB, gradients on their way to NVMe 64.00 KiB); raise host_budget."
        " Not counted in the budgets: activations, and the memory of Python and torch"
    )


@pytest.mark.parametrize(
    ("sizes", "stay"),
    [
        ([8, 8, 8], 0),
        ([40, 8, 8], 1),  # 40 and a window of 16 beside a window of 80
        ([15, 8, 8], 0),  # 15 + 16 > 30
        ([17, 8, 8], 1),
        ([80, 40, 1, 1], 2),  # 120 and 2, 80 and 80, or 160
        ([8], 1),
    ],
)
def test_a_gradient_stays_where_that_takes_less_memory_than_streaming_it(sizes: list[int], stay: int) -> None:
    """The window is for two of the largest that stream."""
    nbytes = [2 * size * SMALLEST_TILE for size in sizes]
    load = example(groups=tuple(GroupSizes(f"g{i}", size, size // 2) for i, size in enumerate(nbytes)))
    streamed = sorted(nbytes)[: len(nbytes) - stay]
    memory = sum(sorted(nbytes)[len(streamed) :]) + 2 * max(streamed, default=0)
    tight = memory + FEWEST_SLOTS * SMALLEST_TILE * (12 + 2 + (2 if streamed else 0))
    plan = make_plan(load, Budgets(PLENTY, tight, PLENTY))
    assert plan.grad_tiers.count(HOST) >= stay  # all, where the window holds what would stream
    with pytest.raises(PlacementError):
        make_plan(load, Budgets(PLENTY, tight - 1, PLENTY))


def test_frozen_parameters_are_read_and_never_written() -> None:
    frozen = (GroupSizes("frozen", 2 * NUMEL, 0),)
    plan = make_plan(example(groups=frozen), Budgets(PLENTY, PLENTY, PLENTY))
    assert plan.nvme_traffic() == (4 * NUMEL, 0)
    assert plan.sub_groups == ()


def test_a_group_used_twice_is_read_twice_and_is_kept_first() -> None:
    groups = tuple(GroupSizes(f"g{i}", 2 * NUMEL, NUMEL, uses=uses) for i, uses in enumerate((1, 3, 2)))
    load = example(groups=groups, offload_optimizer=HOST)
    assert make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).nvme_traffic() == (4 * NUMEL * 6, 2 * NUMEL * 3)
    needed = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).total(HOST)
    room = replace(load, cache_in_host=True)
    tiers = [make_plan(room, Budgets(PLENTY, needed + n * 2 * NUMEL, PLENTY)).param_tiers for n in (0, 1, 2)]
    assert tiers == [(NVME, NVME, NVME), (NVME, HOST, NVME), (NVME, HOST, HOST)]


def test_a_trained_group_is_kept_before_a_frozen_one_that_saves_less() -> None:
    groups = (GroupSizes("frozen", 2 * NUMEL, 0), GroupSizes("trained", 2 * NUMEL, NUMEL))
    load = example(groups=groups, offload_optimizer=HOST)
    needed = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY)).total(HOST)
    plan = make_plan(replace(load, cache_in_host=True), Budgets(PLENTY, needed + 2 * NUMEL, PLENTY))
    assert plan.param_tiers == (NVME, HOST)


def test_the_host_is_filled_with_what_saves_most() -> None:
    """Parameters before gradients before state, and state by the tile."""
    load = example(cache_in_host=True)
    slots, window = FEWEST_SLOTS * SMALLEST_TILE * 16, 2 * 2 * NUMEL
    params, grads, tile = 3 * 2 * NUMEL, 3 * 2 * NUMEL, SMALLEST_TILE * 12
    steps = [
        (slots + window + params, {"parameters": params}),
        # once all gradients are in memory, their window is theirs too, and slots have to hold state alone
        (slots + params + grads, {"parameters": params, "gradients": grads, "optimizer state": tile}),
        (
            slots + params + grads + 5 * tile,
            {"parameters": params, "gradients": grads, "optimizer state": 6 * tile},
        ),
    ]
    for budget, expected in steps:
        contents = make_plan(load, Budgets(PLENTY, budget, PLENTY)).contents(HOST)
        contents.pop("staging")
        assert contents == expected
    everything = params + grads + 3 * NUMEL * 12
    plan = make_plan(load, Budgets(PLENTY, everything, PLENTY))
    assert (plan.total(HOST), plan.total(NVME), plan.staging) == (everything, 0, Staging())
    assert make_plan(load, Budgets(PLENTY, everything - 1, PLENTY)).total(NVME) > 0


def test_at_equal_traffic_what_is_written_is_kept_before_what_is_only_read() -> None:
    """A step of one micro-batch moves each byte of frozen blocks, and of the state of adapters, twice."""
    frozen, adapters, state = 4 * 16 * NUMEL, 4 * 2 * NUMEL, 4 * 12 * NUMEL
    groups = (
        *(GroupSizes(f"frozen{i}", 16 * NUMEL, 0) for i in range(4)),
        *(GroupSizes(f"adapters{i}", 2 * NUMEL, NUMEL) for i in range(4)),
    )
    load = example(groups=groups, cache_in_host=True)
    slots = USUAL_SLOTS * SMALLEST_TILE * (12 + 2)
    once = make_plan(load, Budgets(PLENTY, slots + 2 * adapters + state, PLENTY))
    assert once.contents(NVME) == {"parameters": frozen}
    assert once.nvme_traffic() == (2 * frozen, 0)
    # With two micro-batches a frozen byte moves four times, and a byte of state twice. State has the rest of the room.
    twice = make_plan(replace(load, micro_batches=2), once.budgets)
    rest = (state - frozen // 2) // (12 * SMALLEST_TILE) * 12 * SMALLEST_TILE
    assert twice.contents(NVME) == {"parameters": frozen // 2, "optimizer state": state - rest}


def test_windows_count_what_trains() -> None:
    """A gradient that leaves a GPU, or streams to NVMe, is as large as the trained part of its group."""
    groups = tuple(GroupSizes(f"g{i}", 64 * NUMEL, NUMEL) for i in range(8))
    load = example(groups=groups, device_is_host=False, fetch_by_copy=True, micro_batches=2)
    plan = followed(load, Budgets(PLENTY, 0, PLENTY))
    assert (plan.offload_window_bytes, plan.windows["gradients"]) == (2 * 2 * NUMEL, 2 * 2 * NUMEL)
    assert plan.fetch_window_bytes == 2 * 64 * NUMEL
    assert plan.staging.slot_bytes == SMALLEST_TILE * (12 + 2 + 2)
    assert plan.total(HOST) < 2 * 64 * NUMEL + 16 * NUMEL


def test_only_bytes_on_nvme_need_swap_space() -> None:
    plan = make_plan(example(), Budgets(PLENTY, PLENTY, PLENTY))
    assert plan.contents(NVME) == {"parameters": 3 * 2 * NUMEL, "optimizer state": 3 * 12 * NUMEL}
    need = plan.total(NVME)
    assert make_plan(example(), Budgets(PLENTY, PLENTY, need)).total(NVME) == need
    with pytest.raises(
        PlacementError, match=r"nvme needs 672\.00 KiB but its budget is .*; raise nvme_budget"
    ):
        make_plan(example(), Budgets(PLENTY, PLENTY, need - 1))


def test_a_group_larger_than_the_device_is_refused_by_name() -> None:
    groups = (GroupSizes("root", 2 * NUMEL, NUMEL), GroupSizes("layers.0", 4 * NUMEL, 2 * NUMEL, parent=0))
    load, need = example(groups=groups), 6 * NUMEL
    assert make_plan(load, Budgets(need, PLENTY, PLENTY)).working_bytes == need
    with pytest.raises(PlacementError) as caught:
        make_plan(load, Budgets(need - 1, PLENTY, PLENTY))
    assert "the largest group, 'layers.0', needs 96.00 KiB on the device while it computes" in str(
        caught.value
    )
    assert "raise device_budget to at least 96.00 KiB" in str(caught.value)


def test_what_must_be_in_memory_is_refused_with_every_number() -> None:
    load = example(offload_param=HOST, offload_optimizer=HOST)
    need = 3 * NUMEL * (2 + 2 + 12)
    assert make_plan(load, Budgets(0, need, 0)).total(HOST) == need
    with pytest.raises(PlacementError) as caught:
        make_plan(load, Budgets(0, need - 1, 0))
    assert str(caught.value) == (
        "[TIER-PLAN] host needs at least 768.00 KiB but its budget is 768.00 KiB (parameters 96.00 KiB, gradients"
        " 96.00 KiB, optimizer state 576.00 KiB); raise host_budget, or offload to nvme."
        " Not counted in the budgets: activations, and the memory of Python and torch"
    )


def test_the_table_shows_every_tier() -> None:
    plan = make_plan(example(), Budgets(PLENTY, PLENTY, 1 << 30))
    cells = [cell for column in plan.table().columns for cell in column.cells]
    assert cells[:3] == ["device", "host", "nvme"]
    for expected in ("1.00 GiB", "672.00 KiB", "parameters 96.00 KiB\noptimizer state 576.00 KiB"):
        assert expected in cells
    assert "768.00 KiB" in str(cells[-1])
    assert "672.00 KiB" in str(cells[-1])


def test_slots_shrink_with_the_budget_to_leave_it_to_what_is_kept() -> None:
    """Six slots take no more than a third of what is left, down to the smallest tile."""
    groups = tuple(GroupSizes(f"g{i}", 2 * NUMEL, NUMEL) for i in range(20))
    load = example(groups=groups, offload_param=HOST, cache_in_host=True, sub_group_numel=NUMEL)
    fixed, window, slot = 20 * 2 * NUMEL, 2 * 2 * NUMEL, NUMEL * (12 + 2)
    sizes = (
        (18 * slot, NUMEL),
        (18 * slot - 1, NUMEL // 2),
        (9 * slot - 1, NUMEL // 4),
        (slot, NUMEL // 8),
    )
    for room, numel in sizes:
        plan = make_plan(load, Budgets(PLENTY, fixed + window + room, PLENTY))
        bytes_per_element = 12 + (2 if NVME in plan.grad_tiers else 0)
        slots = max(FEWEST_SLOTS, min(USUAL_SLOTS, room // 3 // (numel * 14)))
        assert (plan.staging.slots, plan.staging.slot_bytes) == (slots, numel * bytes_per_element)


def test_a_group_larger_than_the_devices_room_is_kept_whatever_the_host_budget() -> None:
    """On the CPU it computes in host memory. It used to lose that place to staging when the budget grew."""
    groups = (
        *(GroupSizes(f"small{i}", 2 * NUMEL, NUMEL, uses=3) for i in range(6)),
        GroupSizes("large", 16 * NUMEL, 8 * NUMEL),
    )
    load = example(groups=groups, offload_param=NVME, offload_optimizer=NVME, cache_in_host=True)
    device = 4 * NUMEL
    for host in range(40 * NUMEL, 200 * NUMEL, 4 * NUMEL):
        plan = make_plan(load, Budgets(device, host + 16 * NUMEL, PLENTY))
        assert plan.param_tiers[-1] is HOST


@pytest.mark.parametrize("files", [1, 3])
def test_checksums_are_part_of_the_host_budget(files: int) -> None:
    groups = tuple(GroupSizes(f"g{i}", 4 * MIB, 2 * MIB) for i in range(8))
    load = example(groups=groups, offload_param=NVME, offload_optimizer=NVME, cache_in_host=False)
    plain = make_plan(load, Budgets(PLENTY, PLENTY, PLENTY))
    plan = make_plan(replace(load, verified_files=files), Budgets(PLENTY, PLENTY, PLENTY))
    on_nvme = plan.total(NVME)
    assert on_nvme == plain.total(NVME)
    expected = on_nvme // (16 * MIB) * 16 * 1024 + files * 5 * 16 * 1024
    assert plan.checksum_bytes == plan.contents(HOST)["checksums"] == expected
    assert plan.total(HOST) == plain.total(HOST) + expected
    assert f"checksums {expected / 1024:.2f} KiB" in str(plan)
    assert plain.checksum_bytes == 0 and "checksums" not in plain.contents(HOST)
    cached = make_plan(
        replace(load, verified_files=files, cache_in_host=True), Budgets(PLENTY, PLENTY, PLENTY)
    )
    assert (cached.total(NVME), cached.checksum_bytes) == (0, 0)


def test_a_budget_that_nobody_set_says_where_it_comes_from() -> None:
    load = example()
    free = {NVME: "95% of the free space in /mnt/nvme"}
    with pytest.raises(PlacementError) as caught:
        make_plan(load, Budgets(PLENTY, PLENTY, 4096, free))
    message = str(caught.value)
    assert "its budget is 4.00 KiB (auto: 95% of the free space in /mnt/nvme)" in message
    assert (
        "free disk space, or set nvme_path to another directory" in message
        and "raise nvme_budget" not in message
    )
    with pytest.raises(PlacementError, match=r"its budget is 4\.00 KiB(:| \().*raise nvme_budget"):
        make_plan(load, Budgets(PLENTY, PLENTY, 4096))


def test_experts_are_kept_in_host_memory_after_what_each_pass_reads() -> None:
    """Of three frozen groups of one size, host memory has room for one: the one that is no expert."""
    sizes = {"expert 0": True, "expert 1": True, "dense": False}
    groups = tuple(GroupSizes(name, MIB, 0, routed=routed) for name, routed in sizes.items())
    load = example(groups=groups, cache_in_host=True)
    plan = make_plan(load, Budgets(device=PLENTY, host=MIB + (MIB >> 1), nvme=PLENTY))
    assert list(plan.param_tiers) == [NVME, NVME, HOST]
