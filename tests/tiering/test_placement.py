"""The plan: within every budget, everything placed once, windows large enough, traffic as counted by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tiering.arena import PAGE
from tiering.config import parse_size
from tiering.errors import PlacementError
from tiering.placement import FEWEST_SLOTS, MOST_TILES, SMALLEST_TILE, USUAL_SLOTS, make_plan
from tiering.plan import Budgets, GroupSizes, Plan, Staging, Tier, Workload

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
PLENTY = 1 << 50
MIB = 1 << 20


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    itemsize = draw(st.sampled_from([2, 4]))
    groups = []
    for index in range(draw(st.integers(1, 8))):
        trained, frozen = draw(st.integers(0, 40)), draw(st.integers(0, 10))
        numel = max(1, trained + frozen) * SMALLEST_TILE
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        groups.append(
            GroupSizes(
                name=f"g{index}",
                param_bytes=numel * itemsize,
                trainable_numel=trained * SMALLEST_TILE,
                parent=parent,
                persistent=draw(st.integers(0, 7)) == 0,
                uses=draw(st.integers(1, 3)),
            )
        )
    device_is_host = draw(st.booleans())
    return Workload(
        groups=tuple(groups),
        micro_batches=draw(st.integers(1, 3)),
        compute_itemsize=itemsize,
        grad_itemsize=draw(st.sampled_from([2, 4])),
        state_tensors=draw(st.sampled_from([0, 1, 2])),
        offload_param=draw(st.sampled_from([DEVICE, HOST, NVME, NVME])),
        offload_optimizer=draw(st.sampled_from([DEVICE, HOST, NVME, NVME])),
        cache_in_host=draw(st.integers(0, 3)) > 0,
        sub_group_numel=draw(st.integers(1, 50)) * 1000,
        prefetch_bytes=draw(st.integers(0, 1 << 20)),
        device_is_host=device_is_host,
        verified_files=draw(st.sampled_from([0, 0, 1, 2])),
        fetch_by_copy=not device_is_host or draw(st.booleans()),
        offload_ratio=draw(st.just(1.0) | st.floats(0, 1)),
        split=itemsize == 2 and draw(st.booleans()),
        moment_itemsize=draw(st.sampled_from([4, 2])),
        can_split=itemsize == 2,
        step_in_backward=draw(st.booleans()),
    )


# Budgets around what such workloads need, so that plans, spills and refusals all occur.
budgets = st.builds(
    Budgets,
    st.integers(0, 3 * MIB) | st.just(PLENTY),
    st.integers(0, 6 * MIB),
    st.integers(0, 12 * MIB) | st.just(PLENTY),
)


def planned(load: Workload, limits: Budgets) -> Plan:
    """A plan just within budgets: every refusal raises the budget that it names by a little."""
    for _ in range(400):
        try:
            return make_plan(load, limits)
        except PlacementError as refusal:
            message = str(refusal)
        assert message.startswith("[TIER-PLAN] ")
        assert sum(character.isdigit() for character in message) >= 2
        named = [tier for tier in Tier if f"raise {tier.value}_budget" in message]
        assert len(named) == 1, message
        limit = limits.of(named[0])
        limits = replace(limits, **{named[0].value: limit + limit // 16 + PAGE})
    raise AssertionError(f"raising what the messages name does not help: {message}")


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_no_tier_exceeds_its_budget(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    for tier in Tier:
        assert plan.total(tier) == sum(plan.contents(tier).values()) <= plan.budgets.of(tier)
        assert all(nbytes > 0 for nbytes in plan.contents(tier).values())


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_everything_is_placed_exactly_once(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    assert len(plan.param_tiers) == len(plan.grad_tiers) == len(load.groups)
    for index, group in enumerate(load.groups):
        tiles = [tile for tile in plan.sub_groups if tile.group == index]
        edges = [0, *(tile.end for tile in tiles)]
        assert [tile.start for tile in tiles] == edges[:-1]
        assert edges[-1] == group.trainable_numel
        assert all(tile.numel > 0 and tile.numel % SMALLEST_TILE == 0 for tile in tiles)
    trained = sum(group.trainable_numel for group in load.groups)
    per_element = load.grad_itemsize + load.state_itemsize
    assert plan.state_bytes() == sum(group.param_bytes for group in load.groups) + trained * per_element


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_nothing_is_placed_where_the_configuration_does_not_allow_it(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    order = list(Tier)
    allowed = {DEVICE: {DEVICE}, HOST: {HOST}, NVME: {HOST, NVME}}
    strictly = allowed if load.cache_in_host else {tier: {tier} for tier in order}
    for group, tier in zip(load.groups, plan.param_tiers, strict=True):
        assert tier in ({DEVICE} if group.persistent else strictly[load.offload_param])
    for tile in plan.sub_groups:
        home = load.optimizer_tiers[tile.group]
        assert tile.tier in (strictly[home] if load.state_itemsize else {home, HOST})
    for tier, home in zip(plan.grad_tiers, load.optimizer_tiers, strict=True):
        assert tier in allowed[home]
    parents = {group.parent for group in load.groups}
    for index, (group, tier) in enumerate(zip(load.groups, plan.grad_tiers, strict=True)):
        if group.persistent or index in parents:
            assert tier is not NVME  # it would hold the window open for the whole pass


@settings(deadline=None, max_examples=150)
@given(load=workloads())
def test_the_share_that_leaves_the_device_is_as_configured_but_for_whole_groups(load: Workload) -> None:
    sizes = [group.trainable_numel for group in load.groups]
    stays = [
        size and tier is DEVICE and load.offload_optimizer is not DEVICE
        for size, tier in zip(sizes, load.optimizer_tiers, strict=True)
    ]
    assert set(load.optimizer_tiers) <= {DEVICE, load.offload_optimizer}
    if load.offload_optimizer is DEVICE:
        return
    left = sum(size for size, kept in zip(sizes, stays, strict=True) if not kept)
    spare = left - math.ceil(load.offload_ratio * sum(sizes))  # more than was asked to leave
    assert spare >= 0
    skipped = [size for size, kept in zip(sizes, stays, strict=True) if size and not kept]
    assert all(size > spare for size in skipped)  # any other group would have been too much
    assert sum(sizes) == left or load.offload_ratio < 1
    # The first groups come first: whatever was skipped did not fit beside those kept before it.
    allowed = sum(sizes) - math.ceil(load.offload_ratio * sum(sizes))
    for index, size in enumerate(sizes):
        before = sum(size for size, kept in zip(sizes[:index], stays[:index], strict=True) if kept)
        assert not size or bool(stays[index]) == (before + size <= allowed)


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_the_windows_suffice(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    staging = plan.staging
    grads = [
        group.trainable_numel * load.grad_itemsize
        for group, tier in zip(load.groups, plan.grad_tiers, strict=True)
        if tier is NVME
    ]
    streams = NVME in plan.param_tiers or bool(grads) or any(tile.tier is NVME for tile in plan.sub_groups)
    leaves = [tile for tile in plan.sub_groups if load.optimizer_tiers[tile.group] is not DEVICE]
    assert load.steps_copy_out == (bool(leaves) and not load.device_is_host)
    if streams or load.steps_copy_out:
        assert staging.slots >= FEWEST_SLOTS
        assert staging.slot_bytes % PAGE == staging.param_offset % PAGE == staging.grad_offset % PAGE == 0
    for tile in plan.sub_groups:  # every part of a tile fits its part of a slot
        state = tile.numel * load.state_itemsize if tile.tier is NVME else 0
        leaves_device = load.optimizer_tiers[tile.group] is not DEVICE
        through = (leaves_device and load.steps_copy_out) or plan.param_tiers[tile.group] is NVME
        param = tile.numel * load.compute_itemsize if through else 0
        grad = tile.numel * load.grad_itemsize if plan.grad_tiers[tile.group] is NVME else 0
        assert state <= staging.param_offset or not state
        assert param <= staging.grad_offset - staging.param_offset or not param
        assert grad <= staging.slot_bytes - staging.grad_offset or not grad
    assert plan.grad_window_bytes == 2 * max(grads, default=0)
    if load.fetch_by_copy and NVME in plan.param_tiers:
        assert plan.fetch_window_bytes >= 2 * max(group.param_bytes for group in load.groups)


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_tiles_are_even_and_slots_hold_what_streams_and_no_more(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    for index, group in enumerate(load.groups):
        sizes = [tile.numel for tile in plan.sub_groups if tile.group == index]
        if sizes:
            assert {*sizes[:-1]} <= {sizes[0]} and sizes[-1] <= sizes[
                0
            ] <= load.sub_group_numel + SMALLEST_TILE
            assert (sizes[0] - SMALLEST_TILE) * len(sizes) < group.trainable_numel
    if plan.staging.slots:
        longest = max([SMALLEST_TILE, *(tile.numel for tile in plan.sub_groups)])
        state = load.state_itemsize * (NVME in load.optimizer_tiers)
        param = load.compute_itemsize * (NVME in plan.param_tiers or load.steps_copy_out)
        grad = load.grad_itemsize * (NVME in plan.grad_tiers)
        offsets = longest * state, longest * (state + param), longest * (state + param + grad)
        staging = plan.staging
        assert (staging.param_offset, staging.grad_offset, staging.slot_bytes) == offsets


def followed(load: Workload, limits: Budgets, times: int = 20) -> Plan:
    """A plan within budgets that were raised to just the number that each refusal names, each ``times`` at most."""
    refusals = Counter[Tier]()
    while True:
        try:
            return make_plan(load, limits)
        except PlacementError as refusal:
            message = str(refusal)
        (tier,) = (tier for tier in Tier if f"raise {tier.value}_budget" in message)
        told = re.search(rf"raise {tier.value}_budget to at least ([\d.]+ \w+)", message) or re.search(
            rf"{tier.value} needs (?:at least )?([\d.]+ \w+)", message
        )
        assert told is not None, message
        number = parse_size(told[1])
        assert number > limits.of(tier), message
        limits = replace(limits, **{tier.value: number})
        refusals[tier] += 1
        assert refusals[tier] <= times, message


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_the_number_that_a_refusal_names_suffices(load: Workload, limits: Budgets) -> None:
    followed(load, limits)
    followed(load, Budgets(0, 0, 0))
    for tier in Tier:  # what cannot move; what has to be beside it
        followed(load, replace(Budgets(PLENTY, PLENTY, PLENTY), **{tier.value: limits.of(tier)}), times=2)


@settings(deadline=None, max_examples=40)
@given(load=workloads(), device=st.integers(0, 3 * MIB))
def test_steps_in_backward_fit_into_the_same_host_budget(load: Workload, device: int) -> None:
    """They move fewer gradients. The window stays, though, where all gradients would have been kept without it."""
    least = followed(replace(load, step_in_backward=False), Budgets(device, 0, PLENTY)).budgets
    for spare in (0, PAGE, 16 * PAGE, 100 * PAGE):
        limits = replace(least, host=least.host + spare)
        after, during = (make_plan(replace(load, step_in_backward=on), limits) for on in (False, True))
        windows = during.grad_window_bytes + during.staging.nbytes
        spared = sum(after.nvme_traffic()) + 2 * windows + 3 * dearest_piece(load, after)
        assert sum(during.nvme_traffic()) <= spared


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_each_format_moves_what_its_own_plan_says(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    own = sum(plan.nvme_traffic())
    if not own:
        assert plan.moved_by_format == {load.state_format: 0}
        return
    expected = {}
    for split in (False, True) if load.can_split else (False,):
        for itemsize, suffix in ((4, ""), (2, "bf16")):
            name = "+".join(filter(None, ["split" * split, suffix])) or "fp32"
            try:
                other = make_plan(replace(load, split=split, moment_itemsize=itemsize), plan.budgets)
            except PlacementError:
                continue
            expected[name] = sum(other.nvme_traffic())
    assert plan.moved_by_format == expected
    assert plan.moved_by_format[load.state_format] == own


@settings(deadline=None, max_examples=50)
@given(load=workloads(), limits=budgets)
def test_80_columns_hold_the_table_and_its_formats(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(plan.table())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    trained = sum(group.trainable_numel for group in load.groups)
    told = len(plan.moved_by_format) > 1 and trained > 0
    assert ("by tiering.state:" in shown) == told
    for name, moved in plan.moved_by_format.items() if told else ():
        mark = " (this)" if name == load.state_format else ""
        assert f" {name} {moved / trained:.1f}{mark}" in shown


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets)
def test_the_device_holds_the_deepest_chain(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    stays = {DEVICE, HOST} if load.device_is_host else {DEVICE}
    moving = [
        0 if tier in stays else group.param_bytes
        for group, tier in zip(load.groups, plan.param_tiers, strict=True)
    ]
    chains = []
    for index in range(len(load.groups)):
        chain, at = 0, index
        while at is not None:
            chain += moving[at]
            at = load.groups[at].parent
        chains.append(chain)
    assert max(chains) <= plan.working_bytes <= sum(moving)
    assert plan.working_bytes <= max(chains) + load.prefetch_bytes + PAGE


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets, more=st.integers(1, 4 * MIB))
def test_more_memory_moves_no_more_bytes_but_for_whole_pieces(
    load: Workload, limits: Budgets, more: int
) -> None:
    """Pieces are kept whole: one that fits now can crowd out another that moves more, in each of the three kinds.

    That is with the windows as they are. They may grow with the budget, but then twice as much is never worse.
    """
    limits = replace(limits, nvme=PLENTY)
    less = planned(load, limits)
    limits = less.budgets
    larger = make_plan(load, replace(limits, host=limits.host + more))
    if larger.staging in (less.staging, Staging()):
        assert sum(larger.nvme_traffic()) <= sum(less.nvme_traffic()) + 3 * dearest_piece(load, less)
    twice = make_plan(load, replace(limits, host=2 * limits.host))
    assert sum(twice.nvme_traffic()) <= sum(less.nvme_traffic())
    everything = make_plan(load, replace(limits, host=PLENTY))
    if load.cache_in_host:
        assert everything.nvme_traffic() == (0, 0)


def dearest_piece(load: Workload, plan: Plan) -> int:
    """The most bytes that keeping one piece (parameters or gradients of a group, a tile of state) can save."""
    parameters = [sum(load.param_traffic(group)) for group in load.groups]
    gradients = [2 * load.micro_batches * load.grad_itemsize * group.trainable_numel for group in load.groups]
    return max(parameters + gradients + [2 * tile.numel * load.state_itemsize for tile in plan.sub_groups])


# By hand

NUMEL = 8 * SMALLEST_TILE


def example(**changes: object) -> Workload:
    """Three blocks of 8 x 2048 trainable elements in bf16, one micro-batch, bf16 gradients, all on NVMe."""
    groups = tuple(GroupSizes(f"layers.{i}", 2 * NUMEL, NUMEL) for i in range(3))
    load = Workload(
        groups=groups,
        micro_batches=1,
        compute_itemsize=2,
        grad_itemsize=2,
        state_tensors=2,
        offload_param=NVME,
        offload_optimizer=NVME,
        cache_in_host=False,
        sub_group_numel=SMALLEST_TILE,
        prefetch_bytes=0,
        device_is_host=True,
    )
    return replace(load, **changes)


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
    kept = {
        0.0: (0, 1, 2, 3),
        0.3: (0, 1, 2),
        0.35: (0, 1),
        0.5: (0, 2),  # 5 may stay; g1 would make it 6
        0.85: (2,),
        1.0: (),
    }
    for ratio, expected in kept.items():
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
        " (staging 96.00 KiB, gradients on their way to NVMe 64.00 KiB); raise host_budget, or offload to nvme"
    )


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
    kept = [make_plan(room, Budgets(PLENTY, needed + n * 2 * NUMEL, PLENTY)).param_tiers for n in (0, 1, 2)]
    assert kept == [(NVME, NVME, NVME), (NVME, HOST, NVME), (NVME, HOST, HOST)]


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
        " 96.00 KiB, optimizer state 576.00 KiB); raise host_budget, or offload to nvme"
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
        held = 12 + (2 if NVME in plan.grad_tiers else 0)
        slots = max(FEWEST_SLOTS, min(USUAL_SLOTS, room // 3 // (numel * 14)))
        assert (plan.staging.slots, plan.staging.slot_bytes) == (slots, numel * held)


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
    kept = make_plan(replace(load, verified_files=files, cache_in_host=True), Budgets(PLENTY, PLENTY, PLENTY))
    assert (kept.total(NVME), kept.checksum_bytes) == (0, 0)


@settings(deadline=None, max_examples=150)
@given(load=workloads(), limits=budgets, files=st.integers(1, 3))
def test_checksums_never_break_a_plan_that_has_room_for_them(
    load: Workload, limits: Budgets, files: int
) -> None:
    """The host budget is filled to the brim: what the checksums may need has to be set aside before."""
    plain = planned(replace(load, verified_files=0), limits)
    most = sum(group.param_bytes + group.trainable_numel * 16 for group in load.groups) // 1024
    spare = most + files * 5 * 16 * 1024
    room = replace(plain.budgets, host=plain.budgets.host + spare, nvme=PLENTY)
    assert make_plan(replace(load, verified_files=files), room).total(HOST) <= room.host
