"""Budgets on a GPU are ceilings, and the pinned arena is what every transfer goes through."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiering.plan import Tier
from tiering.swap_space import SwapSpace
from zero3.flat_storage import CopiedStorage
from zero3.tiers import as_tensor

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LAYER = 1024
LAYER_BYTES = LAYER * LAYER * 2  # in bf16
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}


class Stack(nn.Module):
    """All weights, next to no activations."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LAYER, LAYER, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().pow(2).mean()


def inputs() -> Tensor:
    return torch.randn(2, LAYER, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()


def one_step(engine: Any) -> None:
    engine.backward(engine(inputs()))
    engine.step()


def allocated() -> int:
    """Bytes that torch has handed out on the device, once nobody holds garbage."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("placement", [HOST, STREAMED], ids=["host", "nvme"])
def test_what_torch_allocates_is_what_was_planned(
    start: Callable[..., Any], placement: dict[str, Any]
) -> None:
    """Beside its budget a pass needs activations and gradients on their way: far less than the model here."""
    options = {
        "threshold": 0,
        "device_budget": "6MiB",
        "host_budget": "256MiB",
        "prefetch": 10**7,
        **placement,
    }

    def peak_of_training() -> int:
        engine = start(Stack(), **options)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            one_step(engine)
        torch.cuda.synchronize()
        engine.close()
        planned = engine.plan.total(Tier.DEVICE)
        assert planned == 3 * LAYER_BYTES == 6 * MIB
        device = next(tier for tier in engine.snapshot().tiers if tier.name == "device")
        assert device.used <= device.peak <= planned
        return torch.cuda.max_memory_allocated()

    peak_of_training()  # cuBLAS takes its workspaces, one for each thread that computes
    before = allocated()
    peak = peak_of_training() - before
    gradients = 3 * LAYER_BYTES  # one is computed, and two may be leaving
    assert peak <= 6 * MIB + gradients + MIB
    assert peak < 8 * LAYER_BYTES, "the whole model would fit: this shows nothing"


def test_device_memory_at_rest_is_the_planned(start: Callable[..., Any]) -> None:
    before = allocated()
    engine = start(Stack(), device_budget="256MiB")
    planned = engine.plan.total(Tier.DEVICE)
    assert planned == 8 * LAYER * LAYER * (2 + 2 + 12), "parameters, gradients and state"
    scalars = 512 * len(engine._groups)  # what a parameter without bytes points at
    assert planned <= allocated() - before <= planned + scalars
    engine.close()


def test_nothing_stays_on_the_device(build: Callable[..., Any], nvme: Path) -> None:
    def once() -> None:
        engine = build(Stack(2), threshold=0, **STREAMED)
        one_step(engine)
        engine.close()

    once()
    before = allocated()
    for _ in range(3):
        once()
    assert allocated() == before
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("placement", [HOST, STREAMED], ids=["host", "nvme"])
def test_the_whole_arena_is_pinned_until_close(start: Callable[..., Any], placement: dict[str, Any]) -> None:
    engine = start(Stack(2), threshold=0, **placement)
    host = engine._tiers.host
    assert host.capacity == engine.plan.total(Tier.HOST) > 0
    whole = torch.frombuffer(host.memory, dtype=torch.uint8)
    assert whole[: 1 << 12].is_pinned()
    assert whole[host.capacity - (1 << 12) :].is_pinned()
    one_step(engine)
    engine.close()
    assert not whole.is_pinned()
    assert not whole[host.capacity - (1 << 12) :].is_pinned()


def test_the_kernel_and_cuda_hold_the_same_pages(start: Callable[..., Any]) -> None:
    engine = start(Stack(2), threshold=0, io={"engine": "io_uring"}, **STREAMED)
    info = engine._tiers.aio.info
    if "registered_buffers" not in info.flags:
        pytest.skip(f"io_uring registers no buffers here: {info.passed_over}")
    assert info.registered_bytes >= engine._tiers.host.capacity
    before = engine.master_state_dict()
    one_step(engine)
    after = engine.master_state_dict()
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_an_engine_that_nobody_closes_unpins_its_arena(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or CUDA would go on holding pages that the process has unmapped, and refuse them to the next arena there."""
    cudart = torch.cuda.cudart()
    given_back: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(cudart, name)

        def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802
            given_back.append(address)
            return cudart.cudaHostUnregister(address)

    monkeypatch.setattr(torch.cuda, "cudart", Watched)

    def forget() -> int:
        engine = build(Stack(2), threshold=0, **HOST)
        one_step(engine)
        address: int = engine._tiers.host.address
        return address

    for _ in range(3):
        address = forget()
        gc.collect()
        assert given_back == [address]
        given_back.clear()


def test_reads_land_in_the_pinned_arena_and_are_copied_from_there(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(Stack(4), threshold=0, accumulation=2, host_budget="30MiB", **STREAMED)
    host = engine._tiers.host
    landed: list[tuple[int, int]] = []
    swap_in, copy_in = SwapSpace.swap_in, CopiedStorage._copy_in
    copied = 0

    def seen(slab: SwapSpace, extent: Any, lease: Any, **options: Any) -> Any:
        landed.append((lease.address, lease.nbytes))
        return swap_in(slab, extent, lease, **options)

    def from_pinned(storage: CopiedStorage) -> None:
        nonlocal copied
        copied += 1
        assert storage._lease is not None
        source = as_tensor(storage._lease)
        assert source.is_pinned()
        copy_in(storage)
        torch.cuda.synchronize()
        assert torch.equal(storage.flat.view(torch.uint8).cpu(), source)

    monkeypatch.setattr(SwapSpace, "swap_in", seen)
    monkeypatch.setattr(CopiedStorage, "_copy_in", from_pinned)
    for _ in range(4):
        one_step(engine)
    assert engine.global_steps == 2
    assert copied >= 4 * 2 * 4, "each layer is fetched for each forward and backward"
    assert len(landed) > copied, "optimizer state is read as well"
    for address, nbytes in landed:
        assert host.address <= address
        assert address + nbytes <= host.address + host.capacity


def test_gradients_leave_through_the_pinned_arena(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zero3 import grads

    engine = start(Stack(4), threshold=0, host_budget="256MiB", **HOST)
    arrived: list[bool] = []
    add = grads.GradientStore._add_on_host

    def checked(store: Any, group: Any, piece: Any, grad: Tensor) -> None:
        arrived.append(grad.is_pinned())
        add(store, group, piece, grad)

    monkeypatch.setattr(grads.GradientStore, "_add_on_host", checked)
    one_step(engine)
    assert arrived == [True] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("budgets", [{}, {"device_budget": "1MiB"}], ids=["much room", "room for few groups"])
def test_bytes_moved_in_a_steady_step_are_the_planned_ones(
    start: Callable[..., Any], micro_batches: Any, precision: str, accumulation: int, budgets: dict[str, str]
) -> None:
    """What is fetched ahead is used: dropping it, to read it again, would show here."""
    engine = start(precision=precision, accumulation=accumulation, **STREAMED, **budgets)

    def moved_when_quiet() -> tuple[int, int]:
        engine._tiers.staging.drain()
        for extent in [group.home.extent for group in engine._groups if group.home.extent is not None]:
            for part in extent.parts:
                for transfer in part.extent.in_flight:
                    transfer.ticket.wait()
        (path,) = engine.snapshot().io
        return path.read.bytes, path.written.bytes

    totals = []
    for number, (tokens, targets) in enumerate(micro_batches(5 * accumulation), start=1):
        engine.backward(engine(tokens, targets))
        engine.step()
        if number in (2 * accumulation, 5 * accumulation):
            totals.append(moved_when_quiet())
    assert engine.global_steps == 5
    read, written = engine.plan.nvme_traffic()
    assert (totals[1][0] - totals[0][0], totals[1][1] - totals[0][1]) == (3 * read, 3 * written)


def test_tiers_report_no_more_than_their_budgets(train: Callable[..., Any]) -> None:
    run = train(host_budget="4MiB", device_budget="1MiB", accumulation=2, **STREAMED)
    for tier in run.snapshot.tiers:
        assert 0 < tier.used <= tier.peak <= tier.budget, tier.name
        assert sum(tier.by_kind.values()) == tier.used, tier.name
