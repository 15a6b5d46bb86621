"""The forecast: every byte of the plan in a phase, what works beside what, what bounds a step, what hides its I/O."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiering.workloads import (
    DEVICE,
    HOST,
    NUMEL,
    NVME,
    PLENTY,
    STEPS,
    budgets,
    example,
    planned,
    workloads,
)
from tiering.config.step_policy import StepPolicy
from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.updates import update_of
from tiering.placement.workload import Tenant, TenantPiece, Tier, Workload
from tiering.planning.forecast import HIDDEN, Forecast, MachinePart, forecast
from tiering.planning.rates import Rates

# Seconds are then amounts; both ways of a link do not slow each other.
EACH_ONE = Rates(
    **dict.fromkeys((field.name for field in fields(Rates)), 1.0)
    | {"device_link_both": 2.0, "host_memory": None}
)
TRAINED = 3 * NUMEL  # elements of example()


def plan_of(load: Workload, host: int = PLENTY) -> Plan:
    return make_plan(load, Budgets(PLENTY, host, PLENTY))


def busy(estimate: Forecast, part: MachinePart) -> tuple[float, float, float]:
    forward, backward, step = (phase.busy[part] for phase in estimate.phases)
    return forward, backward, step


def infinitely_fast(*names: str) -> Rates:
    return replace(EACH_ONE, **dict.fromkeys(names, 1e30))


@given(workloads(), budgets, st.sampled_from([1, 1, 2, 4]), st.integers(0, 3))
def test_every_byte_that_the_plan_moves_is_in_a_phase(
    load: Workload, limits: Budgets, ranks: int, stage: int
) -> None:
    if ranks > 1:
        whole = [
            replace(g, param_bytes=g.param_bytes * ranks, trainable_numel=g.trainable_numel * ranks)
            for g in load.groups
        ]
        load = replace(load, groups=tuple(whole), world_size=ranks, stage=stage, step=StepPolicy.AFTER)
    plan = planned(load, limits)
    estimate = forecast(plan, replace(EACH_ONE, device_memory=None), tokens=1)
    read, written = plan.nvme_traffic()
    assert sum(busy(estimate, MachinePart.NVME_READS)) == read
    assert sum(busy(estimate, MachinePart.NVME_WRITES)) == written
    assert sum(busy(estimate, MachinePart.NETWORK)) == sum(plan.sent_bytes().values())
    assert all(phase.seconds >= max(phase.busy.values()) for phase in estimate.phases)


def test_state_and_parameters_are_in_the_phases_in_which_they_move() -> None:
    plan = plan_of(example())  # everything on NVMe, bf16, three slots at least
    estimate = forecast(plan, EACH_ONE, tokens=1)
    slots = plan.staging.slots
    tile = plan.sub_groups[0].numel
    ahead, behind = slots * tile * 12, slots * tile * (12 + 2)
    assert busy(estimate, MachinePart.NVME_READS) == (2 * TRAINED, 2 * TRAINED + ahead, 12 * TRAINED - ahead)
    assert busy(estimate, MachinePart.NVME_WRITES) == (behind, 0, 14 * TRAINED - behind)
    assert busy(estimate, MachinePart.OPTIMIZER) == (0, 0, TRAINED)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, TRAINED, 0)  # gradients are taken in
    assert busy(estimate, MachinePart.DEVICE_LINK) == (0, 0, 0)


def test_stepping_in_backward_leaves_nothing_for_the_step() -> None:
    plan = plan_of(example(step=StepPolicy.IN_BACKWARD))
    estimate = forecast(plan, EACH_ONE, tokens=1)
    behind = plan.staging.slots * plan.sub_groups[0].numel * (12 + 2)
    assert estimate.step.seconds == 0
    assert busy(estimate, MachinePart.NVME_READS) == (2 * TRAINED, 14 * TRAINED, 0)
    assert busy(estimate, MachinePart.NVME_WRITES) == (behind, 14 * TRAINED - behind, 0)
    assert busy(estimate, MachinePart.OPTIMIZER) == (0, TRAINED, 0)


def test_a_deferred_step_is_in_the_next_forward() -> None:
    plan = plan_of(example(step=StepPolicy.DEFERRED))
    estimate = forecast(plan, EACH_ONE, tokens=1)
    ahead = plan.staging.slots * plan.sub_groups[0].numel * 12
    assert estimate.step.seconds == 0
    assert busy(estimate, MachinePart.NVME_READS) == (14 * TRAINED - ahead, 2 * TRAINED + ahead, 0)
    assert busy(estimate, MachinePart.NVME_WRITES) == (14 * TRAINED, 0, 0)
    assert busy(estimate, MachinePart.OPTIMIZER) == (TRAINED, 0, 0)
    # Parameters that stay on the device are updated at once.
    resident = plan_of(example(step=StepPolicy.DEFERRED, offload_param=DEVICE))
    assert busy(forecast(resident, EACH_ONE, tokens=1), MachinePart.OPTIMIZER) == (0, 0, TRAINED)
    # In host memory they are hidden between their uses.
    hidden = plan_of(example(step=StepPolicy.DEFERRED, offload_param=HOST))
    assert busy(forecast(hidden, EACH_ONE, tokens=1), MachinePart.OPTIMIZER) == (TRAINED, 0, 0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("tokens", [1, 4, 6, 8, 40])
def test_the_update_is_beside_one_micro_batch_or_behind_all(tokens: int, micro_batches: int) -> None:
    # Reads and writes do not slow each other.
    rates = replace(EACH_ONE, device_memory=None, nvme_mixed=2.0)

    def estimate(step: StepPolicy) -> Forecast:
        return forecast(plan_of(example(micro_batches=micro_batches, step=step)), rates, tokens=tokens)

    staging = plan_of(example()).staging
    ahead, behind = (staging.slots * tile for tile in (staging.param_offset, staging.grad_offset))
    # A forward computes and reads parameters; a backward also takes in gradients; the update reads and writes state.
    forward, backward, state = 2 * tokens * TRAINED, (4 * tokens + 1) * TRAINED, 12 * TRAINED
    params = 2 * TRAINED
    others = (micro_batches - 1) * (max(forward, params) + max(backward, params))
    after, deferred, in_backward = map(estimate, STEPS)
    assert after.seconds == others + (
        max(forward, params, behind)
        + max(backward, params + ahead)
        + max(TRAINED, state - ahead, state + params - behind)
    )
    assert deferred.seconds == others + (
        max(forward + TRAINED, params + state - ahead, state + params) + max(backward, params + ahead)
    )
    assert in_backward.seconds == others + (
        max(forward, params, behind) + max(backward + TRAINED, params + state, state + params - behind)
    )


@settings(deadline=None, max_examples=40)
@given(load=workloads(), limits=budgets, tokens=st.integers(0, 1000))
def test_a_step_that_is_deferred_as_a_whole_is_never_slower(
    load: Workload, limits: Budgets, tokens: int
) -> None:
    load = replace(load, step=StepPolicy.DEFERRED)
    plan = planned(load, limits)
    if any(update_of(plan, run) is not StepPolicy.DEFERRED for run in plan.runs):
        return  # about half of the examples
    after, deferred = (
        forecast(replace(plan, workload=replace(load, step=step)), EACH_ONE, tokens=tokens).seconds
        for step in STEPS[:2]
    )
    assert deferred <= after * (1 + 1e-9)


@pytest.mark.parametrize(
    ("offloaded", "during"),
    [
        ({}, TRAINED),
        ({"offload_param": HOST}, TRAINED),
        ({"offload_param": HOST, "fetch_by_copy": True}, 0),
        ({"offload_optimizer": HOST}, 0),
    ],
    ids=["both on NVMe", "parameters hidden on the host", "parameters on the host", "state on the host"],
)
def test_what_can_be_taken_back_is_updated_in_backward(offloaded: dict[str, Any], during: int) -> None:
    load = example(step=StepPolicy.IN_BACKWARD, versions=2, **offloaded)
    estimate = forecast(plan_of(load), EACH_ONE, tokens=1)
    assert busy(estimate, MachinePart.OPTIMIZER) == (0, during, TRAINED - during)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, TRAINED, 0)
    if not during:
        # The last backward reads state only if the step begins in it.
        state = 12 * TRAINED * ("offload_param" in offloaded)
        assert busy(estimate, MachinePart.NVME_READS)[2] == state


def test_spilled_gradients_are_read_again_by_each_later_micro_batch_and_by_the_step() -> None:
    spilled = example(micro_batches=3, grad_itemsize=4, offload_param=HOST)
    plan = make_plan(spilled, Budgets(PLENTY, 20 * NUMEL, PLENTY))
    gradients = sum(
        group.trainable_numel * 4
        for group, tier in zip(spilled.groups, plan.grad_tiers, strict=True)
        if tier is NVME
    )
    assert gradients > 0
    estimate = forecast(plan, EACH_ONE, tokens=1)
    ahead = plan.staging.slots * plan.sub_groups[0].numel * 12
    assert busy(estimate, MachinePart.NVME_WRITES)[1] == 3 * gradients
    assert busy(estimate, MachinePart.NVME_READS)[1] == 2 * gradients + ahead
    assert sum(busy(estimate, MachinePart.NVME_READS)) == 3 * gradients + 12 * TRAINED


@pytest.mark.parametrize(("checkpointed", "per_token"), [(False, 6), (True, 8)])
def test_operations_by_parameter_and_token(checkpointed: bool, per_token: int) -> None:
    plan = plan_of(example(micro_batches=2))
    estimate = forecast(
        plan, replace(EACH_ONE, device_memory=None), tokens=5, checkpointed=checkpointed, attention_flops=7
    )
    passes = per_token / 2  # a backward is two forwards, and one more if it repeats the forward
    assert sum(busy(estimate, MachinePart.COMPUTE)) == 2 * 5 * (per_token * TRAINED + passes * 7)
    assert estimate.tokens == 10


def test_a_token_that_passes_a_quarter_of_the_experts() -> None:
    estimate = forecast(plan_of(example()), replace(EACH_ONE, device_memory=None), tokens=8, active=0.25)
    assert busy(estimate, MachinePart.COMPUTE) == (2 * 2 * TRAINED, 2 * 4 * TRAINED, 0)


def test_frozen_parameters_have_no_gradients_of_their_own() -> None:
    groups = (GroupSizes("frozen", 2 * NUMEL, 0), GroupSizes("trained", 2 * NUMEL, NUMEL))
    estimate = forecast(plan_of(example(groups=groups)), replace(EACH_ONE, device_memory=None), tokens=1)
    assert busy(estimate, MachinePart.COMPUTE) == (2 * 2 * NUMEL, (2 + 4) * NUMEL, 0)


def test_few_tokens_are_bound_by_the_devices_memory() -> None:
    estimate = forecast(plan_of(example()), replace(EACH_ONE, flops=1e30), tokens=1)
    # Parameters, and gradients.
    assert busy(estimate, MachinePart.COMPUTE) == (2 * TRAINED, (2 + 2) * TRAINED, 0)


def test_on_a_cpu_what_the_cores_do_adds_up() -> None:
    estimate = forecast(plan_of(example(offload_param=DEVICE, offload_optimizer=DEVICE)), EACH_ONE, tokens=1)
    assert estimate.backward.seconds == 4 * TRAINED + TRAINED
    assert estimate.backward.bound is MachinePart.COMPUTE
    assert estimate.step.seconds == TRAINED
    assert estimate.step.bound is MachinePart.OPTIMIZER
    assert estimate.tokens_that_hide == 0


@pytest.mark.parametrize(("stage", "shard_bytes"), [(1, TRAINED / 4), (3, 3 * TRAINED / 4)])
def test_ranks_collect_whole_gradients_before_they_keep_a_part(stage: int, shard_bytes: float) -> None:
    load = example(stage=stage, world_size=4, micro_batches=3, reduce_itemsize=2, offload_param=DEVICE)
    estimate = forecast(plan_of(load), EACH_ONE, tokens=1)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, 3 * TRAINED + shard_bytes, 0)


def test_the_gradients_of_each_chunk_of_rows_are_accumulated() -> None:
    fast = replace(EACH_ONE, flops=1e30)
    estimate = forecast(plan_of(example()), fast, tokens=1, chunks=3)
    assert busy(estimate, MachinePart.COMPUTE) == (2 * TRAINED, (2 + 3 * 2) * TRAINED, 0)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, 3 * TRAINED, 0)
    ranks = plan_of(example(stage=2, world_size=4, micro_batches=2, reduce_itemsize=2, offload_param=DEVICE))
    one, three = (forecast(ranks, fast, tokens=1, chunks=chunks) for chunks in (1, 3))
    more = busy(three, MachinePart.HOST_MEMORY)[1] - busy(one, MachinePart.HOST_MEMORY)[1]
    # Whole gradients are collected; they are reduced, and kept, once per micro-batch.
    assert more == 2 * 2 * TRAINED


def test_activations_are_copied_in_forward_and_by_a_gpu_also_in_backward() -> None:
    moved = Tenant("activations", (TenantPiece(4096, HOST, copied=500),))
    at_home = {"offload_param": DEVICE, "offload_optimizer": DEVICE, "others": (moved,)}
    on_cpu = forecast(plan_of(example(**at_home)), EACH_ONE, tokens=1)
    assert busy(on_cpu, MachinePart.HOST_MEMORY) == (500, TRAINED, 0)
    with_gpu = forecast(plan_of(on_gpu(**at_home)), EACH_ONE, tokens=1)
    assert busy(with_gpu, MachinePart.DEVICE_LINK) == (500, 500, 0)


def on_gpu(**changes: object) -> Workload:
    return example(device_is_host=False, fetch_by_copy=True, **changes)


def test_on_a_gpu_parts_work_beside_each_other() -> None:
    plan = plan_of(on_gpu(offload_param=HOST, offload_optimizer=HOST))
    estimate = forecast(plan, EACH_ONE, tokens=1)
    assert busy(estimate, MachinePart.DEVICE_LINK) == (2 * TRAINED, 2 * TRAINED, 0)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, TRAINED, 0)
    assert estimate.backward.seconds == 4 * TRAINED  # the most that one of them has to do
    assert estimate.step.seconds == TRAINED


def test_what_stays_on_a_gpu_is_stepped_in_its_memory() -> None:
    estimate = forecast(plan_of(on_gpu(offload_param=DEVICE, offload_optimizer=DEVICE)), EACH_ONE, tokens=1)
    assert busy(estimate, MachinePart.OPTIMIZER) == (0, 0, 0)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (0, 0, 0)
    assert busy(estimate, MachinePart.DEVICE_LINK) == (0, 0, 0)
    assert estimate.step.seconds == (2 * 12 + 2 * 2) * TRAINED


def test_what_the_cpu_steps_goes_to_a_gpu_that_keeps_the_parameters() -> None:
    estimate = forecast(plan_of(on_gpu(offload_param=DEVICE, offload_optimizer=HOST)), EACH_ONE, tokens=1)
    # Gradients there, parameters back.
    assert busy(estimate, MachinePart.DEVICE_LINK) == (0, 2 * TRAINED, 2 * TRAINED)


def test_halves_of_masters_come_from_the_gpu_and_go_back() -> None:
    """In the split format the CPU steps the parameters themselves, which the device keeps."""
    load = on_gpu(offload_param=DEVICE, offload_optimizer=HOST, split=True)
    estimate = forecast(plan_of(load), EACH_ONE, tokens=1)
    # Both ways at the same time.
    assert busy(estimate, MachinePart.DEVICE_LINK) == (0, 2 * TRAINED, 2 * TRAINED)


@pytest.mark.parametrize(
    ("offload_param", "room", "there", "back"),
    [(HOST, PLENTY, 12, 12 + 2), (HOST, 8 * NUMEL, 12 + 2, 12 + 2), (DEVICE, PLENTY, 12, 12)],
    ids=["parameters on the host", "gradients, too", "neither"],
)
def test_state_that_visits_a_gpu_crosses_the_link_both_ways(
    offload_param: Tier, room: int, there: int, back: int
) -> None:
    """With gradients that the device has no room for until then; parameters that live in host memory come back, too.

    The CPU steps the rest meanwhile.
    """
    load = on_gpu(offload_param=offload_param, offload_optimizer=HOST, update_on_device=1 / 3)
    plan = make_plan(load, Budgets(room, PLENTY, PLENTY))
    estimate = forecast(plan, replace(EACH_ONE, device_link_both=1.5), tokens=1)
    visits, rest = TRAINED / 3, 2 * TRAINED / 3
    both = min(there, back) * visits
    fetched, stepped = 2 * TRAINED * (offload_param is HOST), 2 * (rest if there == 12 else TRAINED)
    overlap = min(fetched, stepped)
    assert estimate.backward.busy[MachinePart.DEVICE_LINK] == pytest.approx(
        2 * overlap / 1.5 + max(fetched, stepped) - overlap
    )
    # Parameters on the device that the CPU steps go there alone.
    alone = abs(there - back) * visits + (2 * rest if offload_param is DEVICE else 0)
    assert estimate.step.busy[MachinePart.DEVICE_LINK] == pytest.approx(2 * both / 1.5 + alone)
    assert estimate.step.busy[MachinePart.OPTIMIZER] == rest
    assert estimate.step.busy[MachinePart.COMPUTE] == visits * (2 * 12 + 2 * 2)


def test_what_cannot_be_read_to_its_place_is_copied_there() -> None:
    estimate = forecast(plan_of(example(fetch_by_copy=True)), EACH_ONE, tokens=1)
    assert busy(estimate, MachinePart.HOST_MEMORY) == (2 * TRAINED, 2 * TRAINED + TRAINED, 0)


@pytest.mark.parametrize(
    ("slow", "bound"),
    [
        ("flops", MachinePart.COMPUTE),
        ("nvme_read", MachinePart.NVME_READS),
        ("nvme_write", MachinePart.NVME_WRITES),
        ("optimizer", MachinePart.OPTIMIZER),
        ("gradients", MachinePart.HOST_MEMORY),
        ("device_link", MachinePart.DEVICE_LINK),
        ("network", MachinePart.NETWORK),
    ],
)
def test_what_is_slowest_bounds(slow: str, bound: MachinePart) -> None:
    load = on_gpu(world_size=2, reduce_itemsize=2)
    names = [field.name for field in fields(Rates) if field.name not in (slow, "nvme_mixed")]
    estimate = forecast(plan_of(load), replace(infinitely_fast(*names), nvme_mixed=None), tokens=1)
    assert estimate.bound is bound


def test_reads_and_writes_at_once_take_what_the_mix_gives_and_the_rest_alone() -> None:
    rates = replace(
        infinitely_fast("flops", "gradients", "optimizer", "device_memory"), nvme_read=4.0, nvme_write=2.0
    )
    plan = plan_of(example())
    step = forecast(plan, EACH_ONE, tokens=1).step.busy
    read, written = step[MachinePart.NVME_READS], step[MachinePart.NVME_WRITES]
    assert read < written
    mixed = forecast(plan, replace(rates, nvme_mixed=3.0), tokens=1).step
    assert mixed.seconds == pytest.approx(2 * read / 3 + (written - read) / 2)
    assert mixed.stalled == pytest.approx(mixed.seconds)
    in_turn = forecast(plan, replace(rates, nvme_mixed=None), tokens=1).step
    assert in_turn.seconds == pytest.approx(read / 4 + written / 2)


def test_what_is_verified_is_summed_on_the_cores_while_it_moves() -> None:
    fast_cores = infinitely_fast("flops", "optimizer", "gradients", "host_copy", "device_memory")
    rates = replace(fast_cores, nvme_mixed=4.0, checksum=1.0)
    plain = plan_of(example())
    verified = plan_of(example(verified_files=1))
    read, written = verified.nvme_traffic()
    assert (read, written) == plain.nvme_traffic()
    assert forecast(plain, rates, tokens=1) == forecast(plain, replace(rates, checksum=None), tokens=1)
    estimate = forecast(verified, rates, tokens=1)
    assert estimate.seconds == read + written  # a disk alone would take less
    assert (estimate.bound, sum(busy(estimate, MachinePart.CHECKSUMS))) == (
        MachinePart.CHECKSUMS,
        read + written,
    )
    assert estimate.step.stalled == 0.0
    slow = forecast(verified, replace(rates, optimizer=1.0), tokens=1).step
    assert slow.seconds == slow.busy[MachinePart.OPTIMIZER] + slow.busy[MachinePart.CHECKSUMS]
    of_four = forecast(verified, rates, tokens=1, local_ranks=4)
    assert sum(busy(of_four, MachinePart.CHECKSUMS)) == 4 * (read + written)
    fast = replace(rates, checksum=8.0)
    estimate = forecast(verified, fast, tokens=1)
    assert estimate.step.seconds == forecast(plain, rates, tokens=1).step.seconds
    assert estimate.bound in (MachinePart.NVME_READS, MachinePart.NVME_WRITES)


def test_the_fewest_tokens_that_hide() -> None:
    plan = plan_of(example())
    rates = replace(EACH_ONE, device_memory=None, nvme_read=0.5, nvme_write=0.5, nvme_mixed=0.5)
    fewest = forecast(plan, rates, tokens=1).tokens_that_hide

    def stalled(tokens: int) -> float:
        estimate = forecast(plan, rates, tokens=tokens)
        return sum(phase.stalled for phase in estimate.phases) / estimate.seconds

    assert stalled(fewest) <= 1 - HIDDEN < stalled(fewest - 1)


@given(workloads(), budgets, st.sampled_from([field.name for field in fields(Rates)]), st.integers(1, 64))
def test_nothing_takes_longer_on_a_faster_machine(
    load: Workload, limits: Budgets, name: str, tokens: int
) -> None:
    plan = planned(load, limits)
    rates = replace(EACH_ONE, host_memory=1.0)
    estimate = forecast(plan, rates, tokens=tokens)
    faster = forecast(plan, replace(rates, **{name: 2 * getattr(rates, name)}), tokens=tokens)
    assert estimate.seconds / 2 <= faster.seconds <= estimate.seconds


def test_ranks_of_a_node_share_what_it_has() -> None:
    plan = plan_of(example(world_size=4, reduce_itemsize=2))
    alone = forecast(plan, EACH_ONE, tokens=3)
    shared = forecast(plan, EACH_ONE, tokens=3, local_ranks=4)
    for part in (
        MachinePart.NVME_READS,
        MachinePart.NVME_WRITES,
        MachinePart.OPTIMIZER,
        MachinePart.HOST_MEMORY,
    ):
        assert sum(busy(shared, part)) == 4 * sum(busy(alone, part)) > 0
    for part in (MachinePart.COMPUTE, MachinePart.NETWORK):
        assert sum(busy(shared, part)) == sum(busy(alone, part)) > 0
    assert (alone.tokens, shared.tokens) == (3, 12)


def test_a_days_writes_and_the_life_of_a_drive() -> None:
    plan = plan_of(example())
    rates = replace(EACH_ONE, nvme_read=1e5, nvme_write=1e5, nvme_mixed=1e5)
    estimate = forecast(plan, rates, tokens=2, local_ranks=2)
    assert estimate.written == plan.nvme_traffic()[1] == 14 * TRAINED
    assert estimate.written_per_day * estimate.seconds == pytest.approx(2 * 14 * TRAINED * 24 * 60 * 60)
    assert estimate.drive_days(10 * estimate.written_per_day) == pytest.approx(10)
    assert estimate.tokens_per_second * estimate.seconds == pytest.approx(4)
    in_memory = forecast(plan_of(example(offload_param=HOST, offload_optimizer=HOST)), rates, tokens=2)
    assert (in_memory.written_per_day, in_memory.drive_days(600e12)) == (0, None)


@pytest.mark.parametrize("name", ["nvme_read", "nvme_write", "optimizer", "gradients", "flops"])
def test_a_rate_that_the_plan_depends_on_has_to_be_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"needs the rate '{name}'.*measure it"):
        forecast(plan_of(example()), replace(EACH_ONE, **{name: None}), tokens=1)


@pytest.mark.parametrize(
    "name", ["host_copy", "device_link", "device_memory", "network", "nvme_mixed", "checksum"]
)
def test_a_rate_that_it_does_not_need_may_be_unknown(name: str) -> None:
    estimate = forecast(plan_of(example()), replace(EACH_ONE, **{name: None}), tokens=1)
    assert estimate.seconds > 0


def test_tiers_that_are_not_used_need_no_rates() -> None:
    load = example(offload_param=Tier.HOST, offload_optimizer=Tier.HOST)
    estimate = forecast(plan_of(load), Rates(flops=1.0, optimizer=1.0, gradients=1.0), tokens=1)
    assert estimate.seconds == 6 * TRAINED + 2 * TRAINED
