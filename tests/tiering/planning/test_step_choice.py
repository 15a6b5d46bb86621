"""The step of "auto": for which placements each one counts, by rates and without them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.tiering.workloads import DEVICE, HOST, NUMEL, NVME, PLENTY, STEPS, example
from tiering.config.step_policy import StepPolicy
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.updates import hides_in_place
from tiering.placement.workload import Tier
from tiering.planning.forecast import forecast
from tiering.planning.rates import Rates
from tiering.planning.step_choice import choices, choose, seconds_by_step

AFTER, DEFERRED, IN_BACKWARD = STEPS
# Reads and writes do not slow each other.
EACH_ONE = Rates(**dict.fromkeys((field.name for field in fields(Rates)), 1.0) | {"nvme_mixed": 2.0})
FAST = Rates(**{field.name: 1000 * getattr(EACH_ONE, field.name) for field in fields(Rates)})
ON_GPU = {"device_is_host": False, "fetch_by_copy": True}
TRAINED = 3 * NUMEL


def plan_of(**changes: object) -> Plan:
    return make_plan(example(**changes), Budgets(PLENTY, PLENTY, PLENTY))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"offload_param": DEVICE, "offload_optimizer": DEVICE}, (AFTER,)),
        # The CPU computes with parameters in host memory where they are: a deferred step would hide them.
        ({"offload_param": HOST}, (AFTER,)),
        ({"offload_param": HOST, **ON_GPU}, (AFTER, DEFERRED)),
        ({"offload_optimizer": HOST}, (AFTER, DEFERRED)),
        ({}, (AFTER, DEFERRED)),
        ({"versions": 2}, STEPS),
        ({"versions": 2, "offload_optimizer": HOST}, (AFTER, DEFERRED)),
        ({"whole_groups": True}, (AFTER,)),
        # Experts are read one by one.
        ({"groups": (GroupSizes("experts", 2 * NUMEL, NUMEL, expert_bytes=NUMEL),)}, (AFTER,)),
    ],
    ids=str,
)
def test_the_steps_that_change_nothing_but_the_time(
    placement: dict[str, object], expected: tuple[StepPolicy, ...]
) -> None:
    plan = plan_of(**placement)
    assert choices(plan, clips=False) == expected
    assert choices(plan, clips=True) == expected[:2]
    assert choose(expected, None) is expected[min(1, len(expected) - 1)]


@pytest.mark.parametrize(
    ("changes", "group", "tiers"),
    [
        ({"step": AFTER}, {}, (HOST, NVME)),
        (ON_GPU, {}, (HOST, NVME)),
        # Without an exchange of pointers.
        ({"fetch_by_copy": True}, {}, (HOST, NVME)),
        ({"world_size": 2}, {}, (HOST, NVME)),
        ({}, {}, (DEVICE, NVME)),
        ({}, {"trainable_numel": 0}, (HOST, NVME)),
        ({}, {"expert_bytes": NUMEL}, (HOST, NVME)),
    ],
    ids=str,
)
def test_a_step_hides_trained_parameters_in_host_memory_only(
    changes: dict[str, object], group: dict[str, int], tiers: tuple[Tier, Tier]
) -> None:
    for step in (DEFERRED, IN_BACKWARD):
        load = example(step=step, versions=2)
        assert hides_in_place(load, load.groups[0], HOST, NVME)
        assert not hides_in_place(replace(load, **changes), replace(load.groups[0], **group), *tiers)


def test_a_step_that_may_be_taken_back_hides_what_masters_on_nvme_restore() -> None:
    load = example(step=IN_BACKWARD, versions=2)
    group = load.groups[0]
    assert not hides_in_place(load, group, HOST, HOST)
    assert hides_in_place(replace(load, step=DEFERRED), group, HOST, HOST)
    # The parameters are the masters, or a half of them; or there is nothing to go back to.
    in_fp32 = {"compute_itemsize": 4, "grad_itemsize": 4}
    for changes in (in_fp32, {"split": True, "can_split": True}, {"versions": 1}):
        assert not hides_in_place(replace(load, **changes), group, HOST, NVME)
    assert not hides_in_place(load, replace(group, fp32=True), HOST, NVME)


def test_steps_are_compared_with_as_much_compute_as_other_work() -> None:
    plan = plan_of(versions=2)
    ahead, behind = (
        plan.staging.slots * offset for offset in (plan.staging.param_offset, plan.staging.grad_offset)
    )
    params, state, gradients = 2 * TRAINED, 12 * TRAINED, TRAINED
    update = max(TRAINED, state - ahead, state + params - behind)
    compute = max(params, behind) + max(gradients, params + ahead) + update
    forward, backward = compute / 3, compute * 2 / 3 + gradients
    seconds = seconds_by_step(plan, STEPS, EACH_ONE, local_ranks=1)
    assert seconds == pytest.approx(
        {
            AFTER: max(forward, params, behind) + max(backward, params + ahead) + update,
            DEFERRED: max(forward + TRAINED, params + state - ahead, params + state)
            + max(backward, params + ahead),
            IN_BACKWARD: max(forward, params, behind) + max(backward + TRAINED, params + state),
        }
    )
    assert choose(STEPS, seconds) is IN_BACKWARD
    # The rates of the device and of the network do not count.
    assert seconds_by_step(plan, STEPS, replace(EACH_ONE, flops=9.0, network=None), local_ranks=1) == seconds
    assert seconds_by_step(plan, STEPS, EACH_ONE, local_ranks=2) == pytest.approx(
        {step: 2 * each for step, each in seconds.items()}
    )
    assert seconds_by_step(plan, STEPS, FAST, local_ranks=1) == pytest.approx(
        {step: each / 1000 for step, each in seconds.items()}
    )


def test_the_memory_of_a_gpu_is_other_work() -> None:
    plan = plan_of(offload_param=DEVICE, offload_optimizer=DEVICE, **ON_GPU)
    phases = [phase.seconds for phase in forecast(plan, EACH_ONE, tokens=0).phases]
    compute = [sum(phases) / 3, sum(phases) * 2 / 3, 0.0]
    seconds = seconds_by_step(plan, (AFTER,), EACH_ONE, local_ranks=1)
    assert seconds == pytest.approx({AFTER: sum(map(max, phases, compute))})
    # Without its rate there is no other work.
    assert seconds_by_step(plan, (AFTER,), replace(EACH_ONE, device_memory=None), local_ranks=1) is None


def test_a_network_of_unknown_rate_takes_no_time() -> None:
    plan = plan_of(versions=2, world_size=2, stage=3)
    unknown, free, slow = (
        seconds_by_step(plan, STEPS, replace(FAST, network=rate), local_ranks=1) for rate in (None, 1e12, 1.0)
    )
    assert unknown == free
    assert slow is not None and free is not None
    assert min(slow.values()) > max(free.values())


def test_a_plan_that_updates_nothing_has_one_step() -> None:
    assert choices(plan_of(groups=(GroupSizes("frozen", 2 * NUMEL, 0),)), clips=False) == (AFTER,)


def test_without_a_rate_that_the_plan_needs_a_rule_chooses() -> None:
    for missing in ("nvme_read", "optimizer"):
        plan = plan_of(versions=2)
        seconds = seconds_by_step(plan, STEPS, replace(EACH_ONE, **{missing: None}), local_ranks=1)
        assert seconds is None
        assert choose(STEPS, seconds) is DEFERRED


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((1.0, 0.96, 0.96), AFTER), ((1.0, 0.9, 0.87), DEFERRED), ((1.0, 0.9, 0.8), IN_BACKWARD)],
)
def test_a_small_gain_changes_nothing(seconds: tuple[float, ...], expected: StepPolicy) -> None:
    assert choose(STEPS, dict(zip(STEPS, seconds, strict=True))) is expected
