"""The share of updates that a GPU takes over: both end together; none where nobody knows, or where it is little."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiering.workloads import DEVICE, HOST, NUMEL, NVME, PLENTY, example
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets
from tiering.placement.workload import Workload
from tiering.planning.forecast import MachinePart, forecast
from tiering.planning.rates import Rates
from tiering.planning.update_share import best_share

from .asking import Plan, answered

# The device has room to compute and for slots, and none for gradients to stay.
AMPLE = Budgets(400 * NUMEL, PLENTY, PLENTY)
LINK = 14.0  # bytes of an element there, and as many back: a link that takes one element a second
RATES = Rates(optimizer=1.0, device_link=LINK, device_link_both=2 * LINK)


def load(**changes: object) -> Workload:
    """A hundred tiles of one size, all in host memory, beside a GPU."""
    group = GroupSizes("blocks", 2 * 100 * NUMEL, 100 * NUMEL)
    usual = {"offload_param": HOST, "offload_optimizer": HOST, "sub_group_numel": NUMEL}
    return example(groups=(group,), device_is_host=False, fetch_by_copy=True, **(usual | changes))


@pytest.mark.parametrize(
    ("rates", "share"),
    [
        ({}, 0.5),
        ({"optimizer": 3.0}, 0.25),
        ({"optimizer": 1 / 3}, 0.75),
        ({"device_link_both": LINK}, 0.33),  # both ways share what one way has
        ({"device_link_both": None}, 0.5),
        ({"device_memory": 14.0}, 0.33),  # 28 bytes of it for an element
        ({"host_memory": 1.5 * 28}, 0.34),  # of which an element takes 28 bytes wherever it is updated
        ({"host_memory": 28.0}, 0.0),
        ({"optimizer": 30.0}, 0.0),  # not worth its window
        ({"optimizer": None}, 0.0),
        ({"device_link": None}, 0.0),
    ],
)
def test_the_gpu_gets_as_much_as_both_are_done_with_together(
    rates: dict[str, float | None], share: float
) -> None:
    all_rates = replace(RATES, **rates)
    assert best_share(load(), AMPLE, all_rates) == share
    if share:
        planned = make_plan(load(update_on_device=share), AMPLE)
        step = forecast(planned, replace(all_rates, flops=1e30, gradients=1e30), tokens=1).step
        on_device = max(step.busy[MachinePart.DEVICE_LINK], step.busy[MachinePart.COMPUTE])
        both = step.busy[MachinePart.HOST_MEMORY] if "host_memory" in rates else on_device
        assert step.seconds == pytest.approx(max(both, step.busy[MachinePart.OPTIMIZER]))
        assert step.busy[MachinePart.OPTIMIZER] == pytest.approx(both, rel=0.05)


def test_the_cpu_has_what_no_gpu_reaches() -> None:
    """Half of the state is on NVMe: the GPU takes all of the other half, and the CPU steps what passes its slots."""
    streamed = load(offload_optimizer=NVME, cache_in_host=True)
    half = make_plan(streamed, AMPLE).total(HOST) - 100 * NUMEL * 12 // 2
    limits = replace(AMPLE, host=half)
    tiles = [tile for tile in make_plan(streamed, limits).sub_groups if tile.tier is HOST]
    assert 30 < len(tiles) < 60
    assert best_share(streamed, limits, RATES) == 1.0
    assert best_share(streamed, limits, replace(RATES, optimizer=4.0)) < 1.0


@pytest.mark.parametrize(
    "nowhere", [{"device_is_host": True}, {"whole_groups": True}, {"offload_optimizer": DEVICE}], ids=str
)
def test_nothing_visits_where_there_is_no_gpu_or_nothing_for_it(nowhere: dict[str, object]) -> None:
    assert best_share(replace(load(), **nowhere), AMPLE, RATES) == 0.0
    tight = replace(AMPLE, device=2 * 100 * NUMEL + NUMEL)  # no room for two beside the group itself
    assert best_share(load(), tight, RATES) == 0.0


def test_the_command_says_who_updates_what_and_that_it_is_faster(plan: Plan) -> None:
    here = ["--params=60M", "--gpu=24GiB", "--device-budget=2GiB", "--host-budget=8GiB", "--nvme-budget=0"]
    rates = ["--flops=100T", "--gradients=8G", "--host-copy=10GB/s", "--device-link=16GB/s"]
    cpu_alone = answered(plan, *here, *rates[:3], "--optimizer=0.5G", "--device-link=1")
    arguments = [*here, *rates, "--optimizer=0.5G"]
    both = answered(plan, *arguments)
    updated = both["plan"]["updated"]
    assert set(updated) == {"by the CPU", "visiting the device"}
    assert updated["visiting the device"] / sum(updated.values()) == pytest.approx(0.7, abs=0.05)
    assert both["plan"]["tiers"]["device"]["contents"]["update window"] > 0
    assert set(cpu_alone["plan"]["updated"]) == {"by the CPU"}
    step = next(phase for phase in both["forecast"]["phases"] if phase["name"] == "step")
    assert step["seconds"] < 0.4 * sum(updated.values()) / 12 / 0.5e9
    _, out, _ = plan(*arguments)
    assert "visiting the device" in out and "by the CPU" in out
