"""Promise 1 on a GPU: every placement of a small model gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optim_cpu import kernels
from tiering.errors import PlacementError
from tiering.placement.slots import FEWEST_SLOTS
from tiering.placement.workload import Tier
from zero3.device import tiers

from .conftest import DEVICE

pytestmark = pytest.mark.gpu

ON_HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
ALL_ON_NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": ON_HOST,
    "optimizer on host": {"offload_optimizer": "cpu"},
    "parameters on host": {"offload_param": "cpu"},
    "half of the optimizer on host": {"offload_optimizer": "cpu", "ratio": 0.5, "sub_group_size": 50_000},
    "all updated on the device": {**ON_HOST, "update_on_device": 1.0},
    "half updated on the device": {**ON_HOST, "update_on_device": 0.5, "sub_group_size": 50_000},
    "parameters on the device, updated there": {"offload_optimizer": "cpu", "update_on_device": 1.0},
    "split state, updated on the device": {**ON_HOST, "update_on_device": 1.0, "state": "split"},
    "optimizer on nvme": {"offload_optimizer": "nvme", "cache_in_host": False},
    "parameters on nvme, optimizer on host": {
        "offload_param": "nvme",
        "offload_optimizer": "cpu",
        "cache_in_host": False,
    },
    "parameters on host, optimizer on nvme": {
        "offload_param": "cpu",
        "offload_optimizer": "nvme",
        "cache_in_host": False,
    },
    "all on nvme": ALL_ON_NVME,
    "part cached": {"offload_param": "nvme", "offload_optimizer": "nvme", "host_budget": "6MiB"},
    "no prefetch": {**ALL_ON_NVME, "prefetch": 0},
    "host, no prefetch": {"offload_param": "cpu", "offload_optimizer": "cpu", "prefetch": 0},
    "smallest tiles": {**ALL_ON_NVME, "sub_group_size": 1},
    "nothing persistent": {**ALL_ON_NVME, "threshold": 0},
    "room for few groups": {**ALL_ON_NVME, "device_budget": "1MiB"},
    "checksums": {**ALL_ON_NVME, "verify": True},
    "libaio": {**ALL_ON_NVME, "io": {"engine": "libaio"}},
    "threads engine, small blocks": {
        **ALL_ON_NVME,
        "io": {"engine": "threads", "block_size": "4K", "queue_depth": 3},
    },
}
HABITS = [
    pytest.param("bf16", 1, id="bf16-1"),
    pytest.param("bf16", 2, id="bf16-2"),
    pytest.param("fp32", 1, id="fp32-1"),
    pytest.param("fp32", 2, id="fp32-2"),
]


@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_every_placement_gives_the_same_bits(
    train: Callable[..., Any], same: Callable[..., None], precision: str, accumulation: int
) -> None:
    habit = {"precision": precision, "accumulation": accumulation}
    reference = train(**habit)
    assert reference.losses[-1] < reference.losses[0]
    same(train(**habit), reference, "the same again: if this differs, the device does not repeat itself")
    for name, placement in PLACEMENTS.items():
        if placement.get("state") == "split" and precision != "bf16":
            continue  # half of a master is its bf16 parameter
        run = train(**habit, **placement)
        same(run, reference, name)
        if "nvme" in placement.values():
            assert run.snapshot.io[0].read.bytes > 0, name
            assert run.snapshot.io[0].written.bytes > 0, name
        else:
            assert run.snapshot.io == [], name


@pytest.mark.parametrize("placement", [{**ON_HOST, "threshold": 0}, ALL_ON_NVME])
def test_without_a_slab_the_bits_are_the_same(
    train: Callable[..., Any],
    same: Callable[..., None],
    placement: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a torch that cannot exchange the memory of storages."""
    reference = train()
    monkeypatch.setattr(tiers, "can_exchange", lambda device: False)
    same(train(**placement), reference, "resized")


@pytest.mark.parametrize("placement", [{}, ON_HOST, {**ON_HOST, "threshold": 0}, ALL_ON_NVME])
def test_stepping_in_backward_gives_the_same_bits(
    train: Callable[..., Any], same: Callable[..., None], placement: dict[str, Any]
) -> None:
    same(train(clip=0.0, step_in_backward=True, **placement), train(clip=0.0), "step_in_backward")


@pytest.mark.parametrize(("precision", "accumulation"), HABITS)
def test_the_smallest_budgets_give_the_same_bits(
    train: Callable[..., Any], same: Callable[..., None], precision: str, accumulation: int
) -> None:
    """Gradients stream too, every buffer is as small as the plan accepts, and most tensors are larger than a slot."""
    habit = {"precision": precision, "accumulation": accumulation}
    streamed = {**habit, **ALL_ON_NVME}

    def smallest(budget: str, **options: Any) -> str:
        for kib in range(64, 16384, 64):
            try:
                train(0, **streamed, **options, **{budget: f"{kib}KiB"})
            except PlacementError:
                continue
            return f"{kib}KiB"
        raise AssertionError(f"no {budget} is accepted")

    host = smallest("host_budget")
    device = smallest("device_budget", host_budget=host)
    run = train(**streamed, host_budget=host, device_budget=device)
    assert Tier.NVME in run.plan.grad_tiers
    assert run.plan.staging.slots == FEWEST_SLOTS
    assert run.plan.staging.slot_bytes < max(group.param_bytes for group in run.plan.workload.groups)
    same(run, train(**habit), f"{host} on the host, {device} on the device")


def test_bits_do_not_depend_on_the_instruction_set_of_the_cpu(
    train: Callable[..., Any], same: Callable[..., None]
) -> None:
    """The device steps by torch's operations, the host by any of the kernels."""
    reference = train()
    chosen, threads = kernels.instruction_set(), kernels.thread_count()
    try:
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            kernels.set_thread_count(threads if name == chosen else 1)
            same(train(offload_param="cpu", offload_optimizer="cpu"), reference, name)
    finally:
        kernels.set_instruction_set(chosen)
        kernels.set_thread_count(threads)


@pytest.mark.parametrize("placement", [{}, ALL_ON_NVME], ids=["device", "nvme"])
def test_a_model_built_on_the_gpu_under_a_default_device(
    train: Callable[..., Any],
    same: Callable[..., None],
    small_model: type[torch.nn.Module],
    placement: dict[str, Any],
) -> None:
    """Tensors that the engine keeps in host memory are made there, whatever the user's default device is."""
    torch.manual_seed(3)
    model = small_model()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        torch.set_default_device(DEVICE)
        built = small_model()
        built.load_state_dict(values)
        run = train(model=built, **placement)
    finally:
        torch.set_default_device(None)
    same(run, train(model=model), "default device")
