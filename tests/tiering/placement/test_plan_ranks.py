"""Plans of many ranks: what each keeps in each ZeRO stage, the room to reduce gradients in, and what ranks send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.tiering.workloads import (
    DEVICE,
    HOST,
    MIB,
    NUMEL,
    NVME,
    PLENTY,
    budgets,
    example,
    followed,
    planned,
    workloads,
)
from tiering.config.fields import format_need
from tiering.config.step_policy import StepPolicy
from tiering.config.training import format_size
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes, exchanged_at_once
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan, ReductionRoom
from tiering.placement.slots import SMALLEST_TILE
from tiering.placement.workload import Tier, Workload
from tiering.storage.arena import PAGE

ALL = Budgets(PLENTY, PLENTY, PLENTY)


def rooms(plan: Plan) -> ReductionRoom:
    """The rooms of the reduction, whatever is exchanged at once."""
    return replace(plan.reduction, bucket=0)


@st.composite
def ranked(draw: st.DrawFn) -> Workload:
    """What a configuration may ask of 1 to 4 ranks, with groups that divide into their shards."""
    load = draw(workloads())
    ranks, stage = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(0, 3))
    groups = tuple(
        replace(group, param_bytes=ranks * group.param_bytes, trainable_numel=ranks * group.trainable_numel)
        for group in load.groups
    )
    return replace(
        load,
        groups=groups,
        world_size=ranks,
        stage=stage,
        reduce_itemsize=draw(st.sampled_from([0, 2, 4])),
        offload_param=load.offload_param if stage == 3 else DEVICE,
        offload_optimizer=load.offload_optimizer if stage >= 1 else DEVICE,
        step=load.step if ranks == 1 else StepPolicy.AFTER,
    )


@settings(deadline=None, max_examples=80)
@given(load=ranked(), limits=budgets)
def test_a_rank_keeps_to_its_budgets_and_to_its_shards(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    for tier in Tier:
        assert plan.total(tier) == sum(plan.contents(tier).values()) <= plan.budgets.of(tier)
    for index, group in enumerate(load.groups):
        tiles = [tile for tile in plan.sub_groups if tile.group == index]
        edges = [0, *(tile.end for tile in tiles)]
        assert [tile.start for tile in tiles] == edges[:-1]
        shards = load.world_size if load.stage >= 1 else 1
        assert edges[-1] * shards == group.trainable_numel
        assert all(tile.numel > 0 and tile.numel % SMALLEST_TILE == 0 for tile in tiles)
    shards = load.world_size if load.stage >= 1 else 1
    whole = load.world_size > 1 and load.stage <= 1
    parameters = sum(
        group.param_bytes // (1 if group.persistent or load.stage < 3 else load.world_size)
        for group in load.groups
    )
    trained = 0
    for group in load.groups:
        numel, sizes = group.trainable_numel, load.of(group)
        grads = numel if load.world_size > 1 and load.stage == 0 else numel // shards + numel * whole
        trained += grads * sizes.grad_itemsize + numel // shards * sizes.state_itemsize
    assert plan.state_bytes() == parameters + trained


@settings(deadline=None, max_examples=60)
@given(load=ranked(), limits=budgets)
def test_the_number_that_a_refusal_names_suffices_for_ranks(load: Workload, limits: Budgets) -> None:
    followed(load, limits)
    followed(load, Budgets(0, 0, 0))
    for tier in Tier:
        followed(load, replace(ALL, **{tier.value: limits.of(tier)}), times=2)


@settings(deadline=None, max_examples=80)
@given(load=ranked(), limits=budgets)
def test_a_shard_is_never_computed_in_place(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    stays = {DEVICE, HOST} if load.device_is_host else {DEVICE}
    sharded = load.world_size > 1 and load.stage == 3
    rooms = [
        0 if tier in stays and (group.persistent or not sharded) else load.unsharded_bytes(group)
        for group, tier in zip(load.groups, plan.param_tiers, strict=True)
    ]
    for index in range(len(load.groups)):
        chain, at = 0, index
        while at is not None:
            chain += rooms[at]
            at = load.groups[at].parent
        assert chain <= plan.working_bytes <= sum(rooms)


@settings(deadline=None, max_examples=60)
@given(load=ranked(), limits=budgets)
def test_gradients_have_room_to_be_reduced(load: Workload, limits: Budgets) -> None:
    """What is sent has a buffer wherever nothing else keeps it; beside those, the largest group can be exchanged."""
    plan = planned(load, limits)
    assert plan.contents(DEVICE).get("gradient reduction", 0) == plan.reduction.nbytes
    if load.world_size == 1:
        assert plan.reduction.nbytes == load.local_grad_bytes == 0
        return
    parents = {group.parent for group in load.groups}
    parents |= {index for index, group in enumerate(load.groups) if group.beside in parents - {None}}
    stays_open, passing = [0], [0]
    for index, group in enumerate(load.groups):
        sizes = load.of(group)
        itemsize = sizes.reduce_itemsize or sizes.grad_itemsize
        copies = 2 if load.stage <= 1 and itemsize != sizes.grad_itemsize else 1
        (stays_open if group.persistent or index in parents else passing).append(
            group.trainable_numel * itemsize * copies
        )
    largest = max(passing)
    if load.stage >= 2:
        least = ReductionRoom(sum(stays_open), largest, max(*stays_open, 2 * largest))
        usual = ReductionRoom(least.opened, 2 * largest, least.exchanged + largest)
    else:
        least = ReductionRoom(exchanged=max(*stays_open, largest))
        usual = ReductionRoom(exchanged=least.exchanged + largest)
    assert rooms(plan) in (least, usual)
    assert all(room % PAGE == 0 for room in (least.opened, least.collected, least.exchanged))
    if rooms(plan) != usual:
        assert plan.budgets.device - plan.total(DEVICE) < usual.nbytes - least.nbytes


@settings(deadline=None, max_examples=60)
@given(load=workloads(), limits=budgets, stage=st.integers(0, 3), itemsize=st.sampled_from([2, 4]))
def test_one_rank_has_the_same_plan_in_every_stage(
    load: Workload, limits: Budgets, stage: int, itemsize: int
) -> None:
    plan = planned(load, limits)
    same = make_plan(replace(load, stage=stage, reduce_itemsize=itemsize), plan.budgets)
    assert replace(same, workload=load) == plan
    assert plan.sent_bytes() == {}
    assert "rank" not in str(plan) and "network" not in str(plan)


@settings(deadline=None, max_examples=40)
@given(load=ranked(), limits=budgets)
def test_80_columns_hold_the_table_of_ranks(load: Workload, limits: Budgets) -> None:
    plan = planned(load, limits)
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(plan.table())
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    if load.world_size > 1:
        assert f"Placement plan, each of {load.world_size} ranks (stage {load.stage})" in lines[0]
        assert f"send {format_size(sum(plan.sent_bytes().values()))}" in captured.get()


# By hand: a small persistent group; a root, half of it frozen, around two blocks. Sizes are multiples of Q elements.

Q = 4 * SMALLEST_TILE
GROUPS = (
    GroupSizes("persistent", 2 * Q, Q, persistent=True),
    GroupSizes("root", 2 * 4 * Q, 2 * Q),
    GroupSizes("layers.0", 2 * 4 * Q, 4 * Q, parent=1),
    GroupSizes("layers.1", 2 * 4 * Q, 4 * Q, parent=1),
)


def on_device(stage: int, ranks: int, **changes: object) -> Workload:
    load = example(groups=GROUPS, offload_param=DEVICE, offload_optimizer=DEVICE, **changes)
    return replace(load, stage=stage, world_size=ranks)


def in_q(sizes: dict[str, int]) -> dict[str, float]:
    return {kind: nbytes / Q for kind, nbytes in sizes.items()}


# (parameters, gradients, optimizer state, local gradients, gradient reduction, unsharded groups)
KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "local gradients",
    "gradient reduction",
    "unsharded groups",
)


@pytest.mark.parametrize(
    ("stage", "ranks", "expected"),
    [
        *((stage, 1, (26, 22, 132, 0, 0, 0)) for stage in range(4)),
        # Sent from where they are; two blocks' receive buffers of 8 Q.
        (0, 2, (26, 0, 132, 22, 16, 0)),
        (0, 4, (26, 0, 132, 22, 16, 0)),
        (1, 2, (26, 11, 66, 22, 16, 0)),
        (1, 4, (26, 5.5, 33, 22, 16, 0)),
        # Send buffers of the persistent group (2 Q), the root (4 Q) and two blocks (16 Q); two receive buffers, and
        # zeros of 8 Q for a block of which this rank has no gradients.
        (2, 2, (26, 11, 66, 0, 22 + 24, 0)),
        (2, 4, (26, 5.5, 33, 0, 22 + 24, 0)),
        # The persistent group is whole (2 Q), the others are shards of 24 Q; a block and the root compute.
        (3, 2, (14, 11, 66, 0, 22 + 24, 16)),
        (3, 4, (8, 5.5, 33, 0, 22 + 24, 16)),
    ],
)
def test_what_a_rank_keeps(stage: int, ranks: int, expected: tuple[float, ...]) -> None:
    plan = make_plan(on_device(stage, ranks), ALL)
    contents = {kind: nbytes for kind, nbytes in zip(KINDS, expected, strict=True) if nbytes}
    assert in_q(plan.contents(DEVICE)) == contents
    assert plan.total(HOST) == plan.total(NVME) == 0


@pytest.mark.parametrize(
    ("stage", "ranks", "changes", "expected"),
    [
        *((stage, 1, {}, {}) for stage in range(4)),
        (0, 2, {}, {"gradients": 11 + 11}),
        (0, 4, {}, {"gradients": 16.5 + 16.5}),
        *((stage, 2, {}, {"gradients": 11, "updated parameters": 11}) for stage in (1, 2)),
        *((stage, 4, {}, {"gradients": 16.5, "updated parameters": 16.5}) for stage in (1, 2)),
        # The shards of 24 Q, frozen ones among them, twice; the persistent group's 2 Q after the step.
        (3, 2, {}, {"parameters": 24, "gradients": 11, "updated parameters": 1}),
        (3, 4, {}, {"parameters": 36, "gradients": 16.5, "updated parameters": 1.5}),
        # Four micro-batches: in every backward, or in the last.
        (0, 2, {"micro_batches": 4, "grad_itemsize": 4}, {"gradients": 22 + 22}),
        (1, 2, {"micro_batches": 4, "grad_itemsize": 4}, {"gradients": 22, "updated parameters": 11}),
        (
            2,
            2,
            {"micro_batches": 4, "grad_itemsize": 4, "reduce_itemsize": 2},
            {"gradients": 44, "updated parameters": 11},
        ),
        (
            3,
            2,
            {"micro_batches": 4, "grad_itemsize": 4, "reduce_itemsize": 2},
            {"parameters": 96, "gradients": 44, "updated parameters": 1},
        ),
    ],
)
def test_what_a_rank_sends(
    stage: int, ranks: int, changes: dict[str, object], expected: dict[str, float]
) -> None:
    plan = make_plan(on_device(stage, ranks, **changes), ALL)
    assert in_q(plan.sent_bytes()) == expected


def test_a_group_used_twice_is_gathered_twice_and_a_frozen_one_is_never_reduced() -> None:
    groups = (GroupSizes("twice", 2 * Q, Q, uses=2), GroupSizes("frozen", 2 * Q, 0))
    plan = make_plan(replace(on_device(3, 2), groups=groups), ALL)
    assert in_q(plan.sent_bytes()) == {"parameters": 2 * 2 + 2, "gradients": 1}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_swaps_its_shard(ranks: int) -> None:
    """The traffic of one rank, divided: reads of parameters twice and of state, writes of what was updated."""
    plan = make_plan(example(world_size=ranks), ALL)
    numel = 3 * NUMEL // ranks
    assert plan.contents(NVME) == {"parameters": 2 * numel, "optimizer state": 12 * numel}
    assert plan.nvme_traffic() == ((2 + 2 + 12) * numel, (2 + 12) * numel)
    assert plan.contents(HOST)["gradients"] == 2 * numel
    assert plan.contents(DEVICE)["unsharded groups"] == 2 * NUMEL
    assert [tile.end for tile in plan.sub_groups if tile.group == 1][-1] == NUMEL // ranks
    assert "by tiering.state: fp32 30.0 (this), bf16 22.0" in " ".join(str(plan).split())


def test_reduced_gradients_reach_nvme_as_often_as_they_are_reduced() -> None:
    """In stage 1 once per step, in stages 2 and 3 after every backward; the host has room for the windows alone."""
    moved = {}
    for stage in (1, 2, 3):
        load = example(world_size=2, stage=stage, micro_batches=3, offload_param=DEVICE)
        plan = make_plan(load, followed(load, Budgets(PLENTY, 0, PLENTY)).budgets)
        assert plan.windows["gradients"] == 2 * NUMEL // 2 * 2
        state = 12 * 3 * NUMEL // 2
        moved[stage] = [(nbytes - state) // NUMEL for nbytes in plan.nvme_traffic()]
    assert moved == {1: [3, 3], 2: [9, 9], 3: [9, 9]}


def test_slots_hold_a_tile_of_a_shard_as_it_is_cut() -> None:
    """Of 6 quanta in tiles of at most 5 a shard makes two of 3; the whole group would make three of 4."""
    groups = (GroupSizes("layer", 2 * 12 * SMALLEST_TILE, 12 * SMALLEST_TILE),)
    load = example(groups=groups, world_size=2, sub_group_numel=5 * SMALLEST_TILE)
    plan = make_plan(load, ALL)
    assert [tile.numel for tile in plan.sub_groups] == 2 * [3 * SMALLEST_TILE]
    assert (plan.staging.param_offset, plan.staging.slot_bytes) == (36 * SMALLEST_TILE, 42 * SMALLEST_TILE)


def test_shards_in_host_memory_leave_the_working_room_as_it_is() -> None:
    plan = make_plan(replace(example(offload_param=HOST, offload_optimizer=HOST), world_size=2), ALL)
    assert plan.contents(HOST) == {
        "parameters": 3 * NUMEL,
        "gradients": 3 * NUMEL,
        "optimizer state": 18 * NUMEL,
    }
    assert plan.working_bytes == 2 * NUMEL
    alone = make_plan(example(offload_param=HOST, offload_optimizer=HOST), ALL)
    assert alone.working_bytes == 0  # computes where it is


def test_a_gpu_fetches_a_shard_through_its_window_and_sends_one_back() -> None:
    for ranks in (1, 2, 4):
        load = example(
            world_size=ranks, device_is_host=False, fetch_by_copy=True, grad_itemsize=4, micro_batches=2
        )
        plan = make_plan(load, ALL)
        assert plan.fetch_window_bytes == 2 * 2 * NUMEL // ranks
        arriving = 2 * NUMEL if ranks == 1 else 4 * NUMEL // ranks
        assert plan.offload_window_bytes == 2 * arriving


ROOMS = {
    # Sent from where they accumulate: the receive buffers of one block (8 Q), and of one more.
    (0, 0): (ReductionRoom(exchanged=8), ReductionRoom(exchanged=16)),
    (1, 0): (ReductionRoom(exchanged=8), ReductionRoom(exchanged=16)),
    # Copied to 4 bytes per element (16 Q), and received as such.
    (0, 4): (ReductionRoom(exchanged=32), ReductionRoom(exchanged=64)),
    (1, 4): (ReductionRoom(exchanged=32), ReductionRoom(exchanged=64)),
    # The persistent group and the root (6 Q); one block that collects; zeros for one, and what it receives.
    (2, 0): (ReductionRoom(6, 8, 16), ReductionRoom(6, 16, 24)),
    (3, 0): (ReductionRoom(6, 8, 16), ReductionRoom(6, 16, 24)),
    (3, 4): (ReductionRoom(12, 16, 32), ReductionRoom(12, 32, 48)),
}


@pytest.mark.parametrize(("stage", "itemsize"), ROOMS)
def test_the_rooms_are_as_large_as_the_device_budget_allows(stage: int, itemsize: int) -> None:
    """A second block on its way comes after groups that are fetched ahead, and only whole."""
    least, usual = (
        ReductionRoom(Q * room.opened, Q * room.collected, Q * room.exchanged)
        for room in ROOMS[stage, itemsize]
    )
    load = on_device(stage, 2, prefetch_bytes=8 * Q, reduce_itemsize=itemsize)
    ahead = 8 * Q if stage == 3 else 0
    plan = make_plan(load, ALL)
    most, working = plan.total(DEVICE), plan.working_bytes
    assert rooms(make_plan(load, Budgets(most, 0, 0))) == usual
    tight = make_plan(load, Budgets(most - 1, 0, 0))
    assert (rooms(tight), tight.working_bytes) == (least, working)
    need = most - (usual.nbytes - least.nbytes) - ahead
    tightest = make_plan(load, Budgets(need, 0, 0))
    assert (rooms(tightest), tightest.working_bytes) == (least, working - ahead)
    with pytest.raises(
        PlacementError, match=rf"gradient reduction {format_size(least.nbytes)}\); raise device_budg"
    ):
        make_plan(load, Budgets(need - 1, 0, 0))


@pytest.mark.parametrize(("stage", "itemsize"), ROOMS)
def test_a_group_larger_than_the_bucket_needs_room_for_two_buckets(stage: int, itemsize: int) -> None:
    """Half a block is sent at once: it is copied out of the shards, also where a whole block is sent in place."""
    load = replace(on_device(stage, 2, reduce_itemsize=itemsize), reduce_bucket=2 * Q)
    plan = make_plan(load, ALL)
    sent = 2 * Q * (itemsize or 2)
    whole = ROOMS[stage, itemsize][1]
    assert plan.reduction == ReductionRoom(Q * whole.opened, Q * whole.collected, 2 * 2 * sent, 2 * Q)


def test_the_bucket_is_as_large_as_the_device_budget_allows() -> None:
    """Prefetch has less room for one of 8 Mi elements; a larger one has what prefetch leaves."""
    block = 1 << 30  # elements
    groups = tuple(GroupSizes(f"layers.{index}", 2 * block, block) for index in range(4))
    load = example(groups=groups, offload_param=HOST, offload_optimizer=HOST, prefetch_bytes=2 * block)
    # Few tiles: the default of the example makes a million of them, which a plan lists one by one.
    load = replace(load, stage=3, world_size=2, reduce_bucket=50_000_000, sub_group_numel=block)
    assert make_plan(load, ALL).reduction.bucket == 50_000_000
    halves = [50_000_000 >> number for number in range(6)]
    # What is sent, and what is received.
    exchanged = [2 * 2 * exchanged_at_once(block, bucket, 2) for bucket in halves]
    # A block computes, and another one waits for its reduction.
    blocks = 2 * 2 * block

    def bucket(device: int) -> int:
        plan = make_plan(load, Budgets(device, PLENTY, PLENTY))
        assert plan.total(DEVICE) <= device
        return halves.index(plan.reduction.bucket)

    assert [bucket(blocks + nbytes) for nbytes in exchanged[3:]] == [3, 4, 5]
    assert [bucket(blocks + 2 * block + nbytes) for nbytes in exchanged] == [0, 1, 2, 3, 3, 3]
    with pytest.raises(
        PlacementError, match=f"raise device_budget to at least {format_need(blocks + exchanged[5])}"
    ):
        make_plan(load, Budgets(blocks + exchanged[5] - 1, PLENTY, PLENTY))


def test_a_large_root_has_room_for_its_own_reduction() -> None:
    """It is reduced last, from its own buffer (80 Q); what it receives is larger than two blocks together."""
    groups = (
        GROUPS[0],
        GroupSizes("root", 2 * 40 * Q, 40 * Q),
        *GROUPS[2:],
    )
    load = replace(on_device(2, 2), groups=groups)
    assert rooms(make_plan(load, ALL)) == ReductionRoom(82 * Q, 16 * Q, (80 + 8) * Q)
    load = replace(on_device(1, 2, reduce_itemsize=4), groups=groups)
    assert rooms(make_plan(load, ALL)) == ReductionRoom(exchanged=(2 * 160 + 2 * 16) * Q)


def test_frozen_groups_need_no_room_to_be_reduced() -> None:
    groups = (
        GroupSizes("root", 8 * Q, 0),
        GroupSizes("inside", 8 * Q, 0, parent=0),
        GroupSizes("head", 8 * Q, Q),
    )
    for stage, room in (
        (1, ReductionRoom(exchanged=4 * Q)),
        (2, ReductionRoom(0, 4 * Q, 6 * Q)),
    ):
        assert rooms(make_plan(replace(on_device(stage, 2), groups=groups), ALL)) == room
        frozen = make_plan(replace(on_device(stage, 2), groups=groups[:2]), ALL)
        assert rooms(frozen) == ReductionRoom()


def test_gradients_that_wait_for_the_last_backward_are_refused_by_name() -> None:
    for stage in (0, 1):
        load = on_device(stage, 2)
        need = make_plan(load, ALL).total(DEVICE) - 8 * Q
        assert make_plan(load, Budgets(need, 0, 0)).total(DEVICE) == need
        with pytest.raises(PlacementError) as caught:
            make_plan(load, Budgets(need - 1, 0, 0))
        message = str(caught.value)
        assert "local gradients 176.00 KiB, gradient reduction 64.00 KiB); raise device_budget" in message
        assert "or use ZeRO stage 2 or 3. Not counted in the budgets" in message
    with pytest.raises(
        PlacementError, match=r"gradient reduction 240\.00 KiB\); .*or offload to cpu or nvme"
    ):
        make_plan(on_device(2, 2), Budgets(MIB, 0, 0))
    offloaded = replace(on_device(2, 2), offload_optimizer=HOST)
    with pytest.raises(PlacementError, match=r"or offload parameters to cpu or nvme with ZeRO stage 3\."):
        make_plan(offloaded, Budgets(0, PLENTY, PLENTY))


def test_the_table_says_what_each_rank_sends() -> None:
    plan = make_plan(on_device(3, 2), ALL)
    shown = str(plan)
    assert "Placement plan, each of 2 ranks (stage 3)" in shown
    assert f"send {format_size(36 * Q)}" in shown
    assert "gradient reduction 368.00 KiB" in shown
