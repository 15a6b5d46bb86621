"""Our plans and forecasts beside the arithmetic of the ZeRO-Infinity paper, and that beside its printed numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiering.workloads import PLENTY, example
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.workload import Tier, Workload
from tiering.planning.forecast import MachinePart, forecast
from tiering.planning.rates import Rates

from . import zero_infinity as paper
from .zero_infinity import DEVICES, SEQUENCE, SIZES, Size

PEAK = 70e12


def block_model(size: Size, world_size: int, micro_batches: int = 1) -> Workload:
    """The paper's model as a rank of ours sees it: each block a group, everything on NVMe."""
    block = paper.params(1, size.hidden)
    return example(
        groups=tuple(GroupSizes(f"layers.{i}", 2 * block, block) for i in range(size.layers)),
        world_size=world_size,
        micro_batches=micro_batches,
        reduce_itemsize=2,
        device_is_host=False,
        fetch_by_copy=True,
        sub_group_numel=1 << 30,
    )


def plan_of(size: Size, world_size: int) -> Plan:
    return make_plan(block_model(size, world_size), Budgets(PLENTY, PLENTY, PLENTY))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.trillions}T")
def test_the_table_of_memory_requirements(size: Size) -> None:
    assert round(paper.params(size.layers, size.hidden) / 1e12, 2) == size.trillions
    assert round(paper.model_states(size.layers, size.hidden) / paper.TB, 2) == size.model_states
    working = paper.PRINTED_OTHERWISE.get(
        (size.hidden, "state_working"), paper.model_state_working_memory(size.hidden)
    )
    assert round(working / paper.GB, 2) == size.state_working
    activations = paper.activation_working_memory(paper.SEQUENCES_PER_GPU, SEQUENCE, size.hidden, size.heads)
    assert activations / paper.GB == pytest.approx(size.activation_working, abs=0.0051)
    all_kept = activations * size.layers * paper.GPUS_PER_NODE
    assert all_kept / paper.TB == pytest.approx(size.activations, abs=0.0051)
    inputs = paper.activation_checkpoints(paper.CHECKPOINTED_PER_NODE, SEQUENCE, size.hidden, size.layers)
    assert inputs / paper.TB == pytest.approx(size.checkpoints, abs=0.0051)


@pytest.mark.parametrize("size", SIZES[:4], ids=lambda size: f"{size.trillions}T")
def test_our_state_is_the_papers_less_an_fp32_gradient(size: Size) -> None:
    plan = plan_of(size, DEVICES)
    numel = paper.params(size.layers, size.hidden)
    assert (
        plan.state_bytes() * DEVICES == 16 * numel == paper.model_states(size.layers, size.hidden) - 4 * numel
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.trillions}T")
def test_arithmetic_intensities(size: Size) -> None:
    batch, between = 2, 3
    tokens = batch * SEQUENCE
    done = paper.operations(tokens, size.layers, size.hidden)
    assert done / paper.bytes_of_parameters_and_gradients(size.layers, size.hidden) == SEQUENCE * batch
    assert done / paper.bytes_of_optimizer_states(size.layers, size.hidden) == SEQUENCE * batch / 4
    moved = paper.bytes_of_checkpoints(tokens, size.layers, size.hidden, between)
    assert done / moved == pytest.approx(24 * size.hidden * between)


def test_efficiencies_that_the_paper_gives() -> None:
    assert paper.efficiency(SEQUENCE * 1, 70e9, PEAK) > 0.5  # parameters and gradients, one sequence
    assert paper.efficiency(SEQUENCE * 2 / 4, 1.5e12, PEAK) > 0.9  # optimizer states, two


@pytest.mark.parametrize("row", paper.BANDWIDTHS, ids=lambda row: f"{row.peak / 1e12:g} TFLOPS")
def test_the_table_of_bandwidths_keeps_both_efficiencies(row: paper.Bandwidth) -> None:
    # 1.536, printed as 1.5.
    assert DEVICES * row.slow_memory == pytest.approx(row.slow_memory_of_all, rel=0.03)
    assert paper.efficiency(SEQUENCE, row.between_devices, row.peak) == pytest.approx(0.506, abs=0.001)
    assert paper.efficiency(SEQUENCE / 2, row.slow_memory_of_all, row.peak) == pytest.approx(0.916, abs=0.001)


@pytest.fixture(scope="module")
def trillion() -> Plan:
    return plan_of(SIZES[2], DEVICES)


def test_a_trillion_parameters_on_512_ranks(trillion: Plan) -> None:
    size = SIZES[2]
    numel = paper.params(size.layers, size.hidden)
    read, written = trillion.nvme_traffic()
    assert trillion.contents(Tier.NVME) == {
        "parameters": 2 * numel // DEVICES,
        "optimizer state": 12 * numel // DEVICES,
    }
    assert written * DEVICES == (2 + 12) * numel
    assert read * DEVICES == (2 * 2 + 12) * numel
    assert trillion.contents(Tier.HOST)["gradients"] * DEVICES == 2 * numel
    block = paper.params(1, size.hidden)
    assert trillion.working_bytes >= 2 * block  # a block is whole on the device while it computes
    sent = trillion.sent_bytes()
    share = (DEVICES - 1) / DEVICES
    assert sent["parameters"] == 2 * 2 * numel * share
    assert sent["gradients"] == 2 * numel * share


def test_what_the_forecast_makes_of_the_papers_machine(trillion: Plan) -> None:
    """512 V100 with 3 GB/s each from the slow memory, 70 GB/s between them, 70 TFLOPS: as efficient as the paper says.

    The paper adds up what moves and what computes; a forecast has them at the same time within a phase. So its step is
    at least the longer of both, and at most their sum.
    """
    size, row = SIZES[2], paper.BANDWIDTHS[0]
    tokens = 2 * SEQUENCE
    fast = 1e15
    rates = Rates(
        nvme_read=row.slow_memory,
        nvme_write=row.slow_memory,
        nvme_mixed=row.slow_memory,
        flops=row.peak,
        network=row.between_devices,
        device_link=fast,
        optimizer=fast,
        gradients=fast,
    )
    estimate = forecast(trillion, rates, tokens=tokens, checkpointed=True)
    compute = sum(phase.busy[MachinePart.COMPUTE] for phase in estimate.phases)
    assert compute == pytest.approx(paper.operations(tokens, size.layers, size.hidden) / row.peak)
    network = sum(phase.busy[MachinePart.NETWORK] for phase in estimate.phases)
    numel = paper.params(size.layers, size.hidden)
    assert network == pytest.approx(6 * numel * (1 - 1 / DEVICES) / row.between_devices)
    assert estimate.forward.bound is MachinePart.COMPUTE and estimate.backward.bound is MachinePart.COMPUTE
    nvme = sum(trillion.nvme_traffic()) / row.slow_memory
    assert compute <= estimate.seconds <= compute + nvme
    # Parameters move while the device computes; state does not. The paper counts 32 bytes of it, ours has 24.
    assert estimate.efficiency > paper.efficiency(tokens / 4, DEVICES * row.slow_memory, row.peak) > 0.9


def test_more_bandwidth_per_device_by_more_devices(trillion: Plan) -> None:
    """Partitioned state: twice as many ranks have half of the bytes each."""
    twice = make_plan(replace(trillion.workload, world_size=2 * DEVICES), trillion.budgets)
    assert sum(trillion.nvme_traffic()) == 2 * sum(twice.nvme_traffic())
