"""Budgets on a GPU are ceilings, and the pinned arena is what every transfer goes through."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.zero3.inside import wait_for_transfers
from tiering.placement.workload import Tier
from tiering.storage.swap_space import SwapSpace
from zero3.device.link_copies import Copies

from .conftest import DEVICE

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
    return torch.randn(2, LAYER, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)


def one_step(engine: Any) -> None:
    engine.backward(engine(inputs()))
    engine.step()


def allocated() -> int:
    """Bytes that torch has handed out on the device, once nobody holds garbage."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


class Owned:
    """What the engine, and not the model nor autograd, has allocated of the device: the most at one time, in bytes.

    torch tells of each allocation by which lines of Python it was asked for. The engine's are those whose innermost
    line outside of torch is the engine's: hooks run inside of the model's calls, and autograd's own threads run no
    Python but hooks.
    """

    def __init__(self) -> None:
        self.most = 0

    def __enter__(self) -> Self:
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=10**6)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        (trace,) = [each for each in torch.cuda.memory._snapshot()["device_traces"] if each]
        torch.cuda.memory._record_memory_history(None)
        now, allocated = 0, dict[int, int]()
        for entry in trace:
            if entry["action"] == "alloc" and self._is_ours(entry["frames"]):
                allocated[entry["addr"]] = entry["size"]
                now += entry["size"]
                self.most = max(self.most, now)
            elif entry["action"] == "free_completed":  # what a side stream uses still is owned still
                now -= allocated.pop(entry["addr"], 0)

    def _is_ours(self, frames: list[dict[str, Any]]) -> bool:
        inside = (str(Path(torch.__file__).parent), "<")
        outside = [frame["filename"] for frame in frames if not frame["filename"].startswith(inside)]
        return bool(outside) and outside[0].startswith(str(Path(zero3.__file__).parent))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "placement",
    [{}, HOST, STREAMED, {"offload_optimizer": "cpu"}, {**STREAMED, "accumulation": 2}],
    ids=["device", "host", "nvme", "optimizer on host", "nvme, accumulated"],
)
def test_what_the_engine_allocates_stays_within_its_budget(
    start: Callable[..., Any], placement: dict[str, Any]
) -> None:
    """Strictly: whatever the model and autograd allocate beside it, and from the first byte on."""
    budget = {"device_budget": "256MiB" if "offload_param" not in placement else "6MiB"}
    start(Stack(), threshold=0, host_budget="256MiB", **budget, **placement).close()  # what is made once
    with Owned() as owned:
        engine = start(Stack(), threshold=0, host_budget="256MiB", **budget, **placement)
        for _ in range(4):
            one_step(engine)
        engine.close()
    planned = engine.plan.total(Tier.DEVICE)
    assert planned <= engine.plan.budgets.device
    # Beside the planned there are only numbers, in 512 bytes each, and the norm's sums of 4096 elements each.
    assert 0.9 * planned <= owned.most <= planned + LAYER_BYTES // 4


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("placement", [{}, HOST, STREAMED], ids=["device", "host", "nvme"])
def test_fifty_steps_of_changing_shapes_do_not_cut_memory_up(
    start: Callable[..., Any], small_model: type[nn.Module], placement: dict[str, Any]
) -> None:
    """Batches change, groups come and go: what torch has reserved does not grow when the same shapes come again."""
    torch.manual_seed(3)
    engine = start(small_model(), threshold=0, **placement)
    torch.cuda.empty_cache()
    reserved = []
    for step in range(50):
        rows, length = 1 + 7 * (step % 25) % 13, 8 + 5 * (step % 25) % 24
        tokens = torch.randint(512, (rows, length + 1), device=DEVICE)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        reserved.append(torch.cuda.memory_reserved())
    # Torch reserves segments of this size for small tensors; which of them a side stream holds is chance.
    segment = 2 * MIB
    assert max(reserved[25:]) <= max(reserved[:25]) + segment


@pytest.mark.usefixtures("cuda")
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


@pytest.mark.usefixtures("cuda")
def test_device_memory_at_rest_is_the_planned(start: Callable[..., Any]) -> None:
    before = allocated()
    engine = start(Stack(), device_budget="256MiB")
    planned = engine.plan.total(Tier.DEVICE)
    assert planned == 8 * LAYER * LAYER * (2 + 2 + 12), "parameters, gradients and state"
    scalars = 2 * 512 * len(engine._groups)  # the values of parameters without bytes, readable and closed
    assert planned <= allocated() - before <= planned + scalars
    engine.close()


@pytest.mark.usefixtures("cuda")
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


@pytest.mark.usefixtures("cuda")
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


@pytest.mark.usefixtures("cuda")
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


@pytest.mark.usefixtures("cuda")
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


@pytest.mark.usefixtures("cuda")
def test_reads_land_in_the_pinned_arena_and_are_copied_from_there(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(Stack(4), threshold=0, accumulation=2, host_budget="30MiB", **STREAMED)
    host = engine._tiers.host
    landed: list[tuple[int, int]] = []
    swap_in, to_device = SwapSpace.swap_in, Copies.to_device
    copied = 0

    def note_read(slab: SwapSpace, extent: Any, lease: Any, **options: Any) -> Any:
        landed.append((lease.address, lease.nbytes))
        return swap_in(slab, extent, lease, **options)

    def from_pinned(copies: Copies, target: Tensor, source: Tensor, **options: Any) -> Any:
        nonlocal copied
        copied += 1
        assert source.is_pinned()
        assert host.address <= source.data_ptr() < host.address + host.capacity
        arrived = to_device(copies, target, source, **options)
        arrived.wait()
        assert torch.equal(target.cpu(), source)
        return arrived

    monkeypatch.setattr(SwapSpace, "swap_in", note_read)
    monkeypatch.setattr(Copies, "to_device", from_pinned)
    for _ in range(4):
        one_step(engine)
    assert engine.global_steps == 2
    assert copied >= 4 * 2 * 4, "each layer is fetched for each forward and backward"
    assert len(landed) > copied, "optimizer state is read as well"
    for address, nbytes in landed:
        assert host.address <= address
        assert address + nbytes <= host.address + host.capacity


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_leave_through_the_pinned_arena(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    engine = start(Stack(4), threshold=0, host_budget="256MiB", accumulation=accumulation, **HOST)
    host, to_host = engine._tiers.host, Copies.to_host
    arrived: list[int] = []

    def checked(copies: Copies, target: Tensor, source: Tensor, **options: Any) -> Any:
        assert target.is_pinned()
        assert host.address <= target.data_ptr() < host.address + host.capacity
        assert source.is_cuda
        arrived.append(source.nbytes)
        return to_host(copies, target, source, **options)

    monkeypatch.setattr(Copies, "to_host", checked)
    one_step(engine)
    assert arrived == [LAYER_BYTES] * 4, "a gradient leaves once, in the dtype it was computed in"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("budgets", [{}, {"device_budget": "1MiB"}], ids=["much room", "room for few groups"])
def test_bytes_moved_in_a_steady_step_are_the_planned_ones(
    start: Callable[..., Any], micro_batches: Any, precision: str, accumulation: int, budgets: dict[str, str]
) -> None:
    """What is fetched ahead is used: dropping it, to read it again, would show here."""
    engine = start(precision=precision, accumulation=accumulation, **STREAMED, **budgets)

    def moved_when_quiet() -> tuple[int, int]:
        wait_for_transfers(engine)
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
