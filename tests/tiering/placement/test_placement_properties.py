"""Whatever the workload and the budgets: within each of them, everything placed once, windows large enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.tiering.workloads import DEVICE, HOST, MIB, NVME, PLENTY, budgets, followed, planned, workloads
from tiering.config.step_policy import StepPolicy
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan, place
from tiering.placement.plan import Budgets, Plan, Staging
from tiering.placement.slots import FEWEST_SLOTS, SMALLEST_TILE
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import PAGE, round_up

KINDS = ("parameters", "gradients", "optimizer state")
PROMISES: list[Callable[[Workload, Plan], None]] = []


def promise(check: Callable[[Workload, Plan], None]) -> Callable[[Workload, Plan], None]:
    """What holds for every plan: to find one costs more than to look at it, so all look at each."""
    PROMISES.append(check)
    return check


@settings(max_examples=2 * settings().max_examples)
@given(load=workloads(), limits=budgets)
def test_every_plan_keeps_every_promise(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    for check in PROMISES:
        check(load, plan)


@promise
def no_tier_exceeds_its_budget(load: Workload, plan: Plan) -> None:
    for tier in Tier:
        assert plan.total(tier) == sum(plan.contents(tier).values()) <= plan.budgets.of(tier)
        assert all(nbytes > 0 for nbytes in plan.contents(tier).values())


@promise
def everything_is_placed_exactly_once(load: Workload, plan: Plan) -> None:
    assert len(plan.param_tiers) == len(plan.grad_tiers) == len(load.groups)
    for index, group in enumerate(load.groups):
        tiles = [tile for tile in plan.sub_groups if tile.group == index]
        edges = [0, *(tile.end for tile in tiles)]
        assert [tile.start for tile in tiles] == edges[:-1]
        assert edges[-1] == group.trainable_numel
        assert all(tile.numel > 0 and tile.numel % SMALLEST_TILE == 0 for tile in tiles)
    assert plan.state_bytes() == sum(
        group.param_bytes
        + group.trainable_numel * (load.of(group).grad_itemsize + load.of(group).state_itemsize)
        for group in load.groups
    )


@promise
def nothing_is_placed_where_the_configuration_does_not_allow_it(load: Workload, plan: Plan) -> None:
    order = list(Tier)
    allowed = {DEVICE: {DEVICE}, HOST: {HOST}, NVME: {HOST, NVME}}
    strictly = allowed if load.cache_in_host else {tier: {tier} for tier in order}
    for group, tier in zip(load.groups, plan.param_tiers, strict=True):
        assert tier in ({DEVICE} if group.persistent else strictly[load.offload_param])
    for tile in plan.sub_groups:
        home = load.optimizer_tiers[tile.group]
        assert tile.tier in (strictly[home] if plan.sizes_of(tile).state_itemsize else {home, HOST})
    for index, (tier, home) in enumerate(zip(plan.grad_tiers, load.optimizer_tiers, strict=True)):
        visits = all(tile.visits for tile in plan.sub_groups if tile.group == index)
        assert tier in allowed[home] or (visits and tier is DEVICE)
    parents = {group.parent for group in load.groups}
    for index, (group, tier) in enumerate(zip(load.groups, plan.grad_tiers, strict=True)):
        if group.persistent or index in parents or (group.beside is not None and group.beside in parents):
            assert tier is not NVME  # it would hold the window open for the whole pass


@promise
def other_tenants_are_placed_like_those_of_the_engine(load: Workload, plan: Plan) -> None:
    pieces = [(tenant, piece) for tenant in load.others for piece in tenant.pieces]
    tiers = [tier for tenant in load.others for tier in plan.tiers[tenant.kind]]
    for (tenant, piece), tier in zip(pieces, tiers, strict=True):
        kept = not tenant.offloaded or load.cache_in_host
        may_be_kept = piece.tier is NVME and kept and not piece.fixed
        assert tier is piece.tier or (tier is HOST and may_be_kept)
    for tenant in load.others:
        streamed = [
            piece.nbytes
            for (of, piece), tier in zip(pieces, tiers, strict=True)
            if of is tenant and tier is NVME and not piece.fixed
        ]
        assert plan.windows[tenant.kind] == 2 * max(streamed, default=0)
        for tier in Tier:
            placed = zip(pieces, tiers, strict=True)
            nbytes = sum(piece.nbytes for (of, piece), at in placed if of is tenant and at is tier)
            assert plan.contents(tier).get(tenant.kind, 0) == nbytes


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
    moved_bytes = sum(size for size, stay in zip(sizes, stays, strict=True) if not stay)
    spare = moved_bytes - math.ceil(load.offload_ratio * sum(sizes))  # more than was asked to leave
    assert spare >= 0
    skipped = [size for size, stay in zip(sizes, stays, strict=True) if size and not stay]
    assert all(size > spare for size in skipped)  # any other group would have been too much
    assert sum(sizes) == moved_bytes or load.offload_ratio < 1
    # The first groups come first: whatever was skipped did not fit beside those kept before it.
    allowed = sum(sizes) - math.ceil(load.offload_ratio * sum(sizes))
    for index, size in enumerate(sizes):
        before = sum(size for size, stay in zip(sizes[:index], stays[:index], strict=True) if stay)
        assert not size or bool(stays[index]) == (before + size <= allowed)


@promise
def the_windows_suffice(load: Workload, plan: Plan) -> None:
    staging = plan.staging
    grads = [
        group.trainable_numel * load.of(group).grad_itemsize
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
        sizes = load.of(load.groups[tile.group])
        state = tile.numel * sizes.state_itemsize if tile.tier is NVME else 0
        leaves_device = load.optimizer_tiers[tile.group] is not DEVICE
        through = (leaves_device and load.steps_copy_out) or plan.param_tiers[tile.group] is NVME
        param = tile.numel * sizes.compute_itemsize if through else 0
        grad = tile.numel * sizes.grad_itemsize if plan.grad_tiers[tile.group] is NVME else 0
        assert state <= staging.param_offset or not state
        assert param <= staging.grad_offset - staging.param_offset or not param
        assert grad <= staging.slot_bytes - staging.grad_offset or not grad
    assert plan.windows["gradients"] == 2 * max(grads, default=0)
    if load.fetch_by_copy and NVME in plan.param_tiers:
        largest = max(group.param_bytes + (group.in_files or (0, 0))[1] for group in load.groups)
        assert plan.fetch_window_bytes >= 2 * largest


@promise
def further_versions_of_what_is_trained_take_room(load: Workload, plan: Plan) -> None:
    state = sum(plan.tile_state_bytes(tile) for tile in plan.sub_groups if tile.tier is NVME)
    assert plan.contents(NVME).get("optimizer state", 0) == (load.versions + load.snapshots) * state
    assert plan.nvme_traffic_by_kind()[1]["optimizer state"] == state


@promise
def a_snapshot_has_room_for_what_it_reads_in_memory(load: Workload, plan: Plan) -> None:
    written = 0
    for tile in plan.sub_groups if load.snapshots else ():
        written += 0 if tile.tier is NVME else round_up(plan.tile_state_bytes(tile))
    for group, tier in zip(load.groups, plan.param_tiers, strict=True) if load.snapshots else ():
        # Elsewhere, the masters are optimizer state.
        if tier is not NVME and (load.split or group.fp32 or load.compute_itemsize == 4):
            written += round_up(load.state_numel(group) * load.of(group).compute_itemsize)
    assert plan.snapshot_bytes == written
    assert plan.contents(NVME).get("snapshots", 0) == 2 * written


@promise
def files_of_a_user_take_no_swap_space(load: Workload, plan: Plan) -> None:
    on_nvme = [group for group, tier in zip(load.groups, plan.param_tiers, strict=True) if tier is NVME]
    assert plan.in_place_bytes == sum(group.param_bytes for group in on_nvme if group.in_files)
    swapped = sum(
        group.param_bytes * (1 + len(load.kept_params(group))) for group in on_nvme if not group.in_files
    )
    assert plan.contents(NVME).get("parameters", 0) == swapped
    fetched = sum(
        2
        * load.micro_batches
        * group.uses
        * (group.in_files.read_bytes if group.in_files else group.param_bytes)
        for group in on_nvme
    )
    written = plan.nvme_traffic_by_kind()[1]["parameters"]
    assert fetched <= plan.nvme_traffic_by_kind()[0]["parameters"] <= fetched + written


@promise
def tiles_are_even_and_slots_hold_what_streams_and_no_more(load: Workload, plan: Plan) -> None:
    for index, group in enumerate(load.groups):
        sizes = [tile.numel for tile in plan.sub_groups if tile.group == index]
        if sizes:
            assert {*sizes[:-1]} <= {sizes[0]} and sizes[-1] <= sizes[
                0
            ] <= load.sub_group_numel + SMALLEST_TILE
            assert (sizes[0] - SMALLEST_TILE) * len(sizes) < group.trainable_numel
    if plan.staging.slots:
        passing = [tile for tile in plan.sub_groups if not (tile.visits and tile.tier is DEVICE)]
        longest = [(tile.numel, plan.sizes_of(tile)) for tile in passing]
        longest += [(SMALLEST_TILE, load.of(group)) for group in load.groups]
        state = max(numel * each.state_itemsize for numel, each in longest) * (NVME in load.optimizer_tiers)
        param = max(numel * each.compute_itemsize for numel, each in longest)
        param *= NVME in plan.param_tiers or load.steps_copy_out
        grad = max(numel * each.grad_itemsize for numel, each in longest) * (NVME in plan.grad_tiers)
        offsets, staging = (state, state + param, state + param + grad), plan.staging
        assert (staging.param_offset, staging.grad_offset, staging.slot_bytes) == offsets


@promise
def what_visits_a_gpu_can_and_is_as_much_as_asked_for(load: Workload, plan: Plan) -> None:
    tiers = {
        tile: (tile.tier, plan.param_tiers[tile.group], plan.grad_tiers[tile.group])
        for tile in plan.sub_groups
    }
    visiting = [tile for tile in plan.sub_groups if tile.visits]
    must = [tile for tile, at in tiers.items() if at[:2] == (DEVICE, HOST) and load.offload_param is HOST]
    could = [tile for tile, at in tiers.items() if tile.tier is HOST and NVME not in at]
    if load.device_is_host:
        assert not visiting
        must = could = []
    target = load.update_on_device * sum(tile.numel for tile in could)
    chosen = [tile for tile in visiting if tile.tier is HOST]
    assert [tile for tile in visiting if tile.tier is not HOST] == must
    assert chosen in ([], could[: len(chosen)])
    if chosen:  # in whole tiles
        assert sum(tile.numel for tile in chosen[:-1]) < target <= sum(tile.numel for tile in chosen)
    window = plan.update_window
    assert window.slots >= 2 if visiting else window == Staging()
    for tile in visiting:
        at, sizes = tiers[tile], plan.sizes_of(tile)
        state, param, grad = (
            tile.numel * size * (tier is HOST)
            for size, tier in zip(
                (sizes.state_itemsize, sizes.compute_itemsize, sizes.grad_itemsize), at, strict=True
            )
        )
        assert state <= window.param_offset
        assert param <= window.grad_offset - window.param_offset
        assert grad <= window.slot_bytes - window.grad_offset


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
    least = followed(replace(load, step=StepPolicy.AFTER), Budgets(device, 0, PLENTY)).budgets
    for spare in (0, PAGE, 16 * PAGE, 100 * PAGE):
        limits = replace(least, host=least.host + spare)
        steps = StepPolicy.AFTER, StepPolicy.IN_BACKWARD
        after, during = (make_plan(replace(load, step=step), limits) for step in steps)
        windows = during.windows["gradients"] + during.staging.nbytes
        spared = sum(after.nvme_traffic()) + 2 * windows + 3 * dearest_piece(load, after)
        assert sum(during.nvme_traffic()) <= spared


@pytest.mark.parametrize(
    ("sizes", "device", "others"),
    [
        # The child is too large for the device while its parent is on NVMe, but not once host memory has that.
        ((GroupSizes("parent", 8192, 0), GroupSizes("child", 90112, 2048, parent=0)), 90112, {}),
        # One group of the two pairs does not suffice, and all but the last are more than needed.
        (
            (
                GroupSizes("frozen", 147456, 16384),
                GroupSizes("parent", 147456, 34816, beside=2),
                GroupSizes("beside parent", 319488, 65536, uses=2, beside=1),
                GroupSizes("child", 327680, 67584, parent=2, uses=3, beside=4),
                GroupSizes("beside child", 311296, 69632, parent=2, uses=2, beside=3),
            ),
            1127595,
            {"micro_batches": 2, "grad_itemsize": 4, "state_tensors": 1, "offload_ratio": 0.65},
        ),
        # An expert's room on the device is more than the bytes of all: each expert begins on a page there.
        (
            (
                GroupSizes("root", 10 * PAGE, 10240, uses=2),
                GroupSizes("experts", 3 * PAGE, 0, parent=0, routed=True, expert_bytes=4 * PAGE),
            ),
            0,
            {},
        ),
    ],
    ids=lambda value: value[-1].name if isinstance(value, tuple) else "",
)
def test_more_host_memory_never_costs_the_plan(
    sizes: tuple[GroupSizes, ...], device: int, others: dict[str, Any]
) -> None:
    """Of groups that are too large for the device together, some compute in host memory."""
    load = Workload(
        groups=sizes,
        micro_batches=1,
        compute_itemsize=4,
        grad_itemsize=2,
        state_tensors=2,
        offload_param=Tier.NVME,
        offload_optimizer=Tier.NVME,
        cache_in_host=True,
        sub_group_numel=1000,
        prefetch_bytes=0,
        device_is_host=True,
    )
    load = replace(load, **others)
    ample = place(load, Budgets(device, PLENTY, PLENTY)).total(Tier.HOST)
    fits = False
    for host in range(0, ample + 2 * PAGE, PAGE):
        try:
            place(load, Budgets(device, host, PLENTY))
            fits = True
        except PlacementError:
            assert not fits, f"a host budget of {host} is too small, and a smaller one was not"
    assert fits


@promise
def each_format_moves_what_its_own_plan_says(load: Workload, plan: Plan) -> None:
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


@promise
def the_host_budget_that_is_named_keeps_all_off_nvme(load: Workload, plan: Plan) -> None:
    need, cached = plan.host_without_nvme, replace(load, cache_in_host=True)
    if not sum(plan.nvme_traffic()):
        assert need is None
    elif need is None:
        assert sum(place(cached, replace(plan.budgets, host=PLENTY)).nvme_traffic())
    else:
        assert not sum(place(cached, replace(plan.budgets, host=need)).nvme_traffic())
        if load.device_is_host and need > plan.budgets.host:
            # Windows, from which gradients are used at once, may take less room than all gradients.
            if load.step is StepPolicy.IN_BACKWARD:
                assert need <= place(cached, replace(plan.budgets, host=PLENTY)).total(Tier.HOST)
            else:
                assert sum(place(cached, replace(plan.budgets, host=need - 1)).nvme_traffic())


@promise
def eighty_columns_hold_the_table_and_its_formats(load: Workload, plan: Plan) -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(plan.table())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    trained = sum(group.trainable_numel for group in load.groups)
    shows_formats = len(plan.moved_by_format) > 1 and trained > 0
    assert ("by tiering.state:" in shown) == shows_formats
    for name, moved in plan.moved_by_format.items() if shows_formats else ():
        mark = " (this)" if name == load.state_format else ""
        assert f" {name} {moved / trained:.1f}{mark}" in shown


@promise
def the_device_holds_the_deepest_chain(load: Workload, plan: Plan) -> None:
    stays = {DEVICE, HOST} if load.device_is_host else {DEVICE}
    # What is read from files lands in some bytes more.
    slack = [
        0 if load.fetch_by_copy or group.in_files is None else group.in_files.slack for group in load.groups
    ]
    moving = [
        0 if tier in stays else group.param_bytes + more
        for group, tier, more in zip(load.groups, plan.param_tiers, slack, strict=True)
    ]
    pairs = [{index, group.beside} - {None} for index, group in enumerate(load.groups)]
    chains = []
    for index in range(len(load.groups)):
        chain, at = 0, index
        while at is not None:
            chain += sum(moving[each] for each in pairs[at])
            at = load.groups[at].parent
        chains.append(chain)
    assert max(chains) <= plan.working_bytes <= sum(moving)
    enclosing = set().union(*(pairs[group.parent] for group in load.groups if group.parent is not None))
    inner = [
        sum(moving[each] for each in pairs[index]) for index in range(len(moving)) if index not in enclosing
    ]
    ahead = max(load.prefetch_bytes, *inner) if load.prefetch_bytes else 0
    assert plan.working_bytes <= max(chains) + ahead + PAGE


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
    larger = make_plan(load, replace(limits, host=limits.host + more))  # never a refusal
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
    gradients = [
        2 * load.micro_batches * load.of(group).grad_itemsize * group.trainable_numel for group in load.groups
    ]
    others = [piece.read + piece.written for tenant in load.others for piece in tenant.pieces]
    tiles = [2 * plan.tile_state_bytes(tile) for tile in plan.sub_groups]
    return max(parameters + gradients + tiles + others)


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
