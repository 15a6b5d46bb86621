"""The fake device finds each wait that is missing, and nothing where none is: otherwise no test of order says anything.

Each pair is one mistake and the program without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optim_cpu import kernels
from optim_cpu.kernels import DType
from tests.fakes.gpu.streams import never
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, round_up
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import Section, SwapSpace
from zero3.device.storages import apart, as_tensor, exchange_pointers

from .fake_device import DEVICE, FakeDevice, NotOrdered

Program = Callable[[FakeDevice, bool], None]  # as it is right, or with its mistake

NUMEL = 64
BYTES = 4 * NUMEL


def on_device(value: float = 1.0) -> Tensor:
    return torch.full((NUMEL,), value, device=DEVICE)


def room(gpu: FakeDevice) -> Tensor:
    """On the device, for copies."""
    tensor = torch.empty(NUMEL, device=DEVICE)
    gpu.streams.fetch.wait_for(gpu.streams.compute.record())
    return tensor


def pinned(value: float = 1.0) -> Tensor:
    return torch.empty(NUMEL, pin_memory=True).fill_(value)


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def compute_waits_for_a_copy(gpu: FakeDevice, right: bool) -> None:
    target, source = room(gpu), pinned()
    fetch = gpu.streams.fetch
    with fetch.running():
        copy(target, source)
    if right:
        gpu.streams.compute.wait_for(fetch.record())
    target.sum()
    fetch.synchronize()


def compute_waits_for_the_right_event(gpu: FakeDevice, right: bool) -> None:
    target, source = room(gpu), pinned()
    fetch = gpu.streams.fetch
    early = fetch.record()
    with fetch.running():
        copy(target, source)
    late = fetch.record()
    gpu.streams.compute.wait_for(late if right else early)
    target.sum()
    fetch.synchronize()


def compute_waits_for_the_right_stream(gpu: FakeDevice, right: bool) -> None:
    target, source = room(gpu), pinned()
    with gpu.streams.fetch.running():
        copy(target, source)
    waited = gpu.streams.fetch if right else gpu.streams.offload
    gpu.streams.compute.wait_for(waited.record())
    target.sum()
    gpu.streams.fetch.synchronize()


def a_copy_waits_for_compute(gpu: FakeDevice, right: bool) -> None:
    """The buffer is filled anew while compute still reads it."""
    target, source = on_device(), pinned()
    target.sum()
    if right:
        gpu.streams.fetch.wait_for(gpu.streams.compute.record())
    with gpu.streams.fetch.running():
        copy(target, source)
    gpu.streams.compute.wait_for(gpu.streams.fetch.record())
    target.sum()
    gpu.streams.fetch.synchronize()


def the_cpu_waits_for_what_it_reads(gpu: FakeDevice, right: bool) -> None:
    target, source = pinned(), on_device()
    offload = gpu.streams.offload
    offload.wait_for(gpu.streams.compute.record())
    with offload.running():
        copy(target, source)
    event = offload.record()
    if right:
        event.wait()
    kernels.sum_of_squares(target.data_ptr(), DType.FP32, NUMEL)
    event.wait()


def an_answer_is_heard(gpu: FakeDevice, right: bool) -> None:
    """``done`` has said yes, or was not listened to when it said no."""
    gpu.answers = never
    target, source = pinned(), on_device()
    offload = gpu.streams.offload
    offload.wait_for(gpu.streams.compute.record())
    with offload.running():
        copy(target, source)
    event = offload.record()
    assert not event.done()
    if right:
        event.wait()
        assert event.done()
    target.numpy()
    event.wait()


def the_cpu_leaves_alone_what_is_copied(gpu: FakeDevice, right: bool) -> None:
    target, source = room(gpu), pinned()
    with gpu.streams.fetch.running():
        copy(target, source)
    if right:
        gpu.streams.fetch.record().wait()
    source.fill_(2.0)
    gpu.streams.fetch.synchronize()


def a_lease_is_given_back_after_the_copy(gpu: FakeDevice, right: bool) -> None:
    arena = Arena.map(4096, "host")
    target = room(gpu)
    lease = arena.lease(BYTES, "fetched")
    source = as_tensor(lease)[:BYTES].view(torch.float32).fill_(1.0)
    with gpu.streams.fetch.running():
        copy(target, source)
    if right:
        lease.retire(gpu.streams.fetch.record())
    else:
        lease.release()
    again = arena.lease(BYTES, "next")
    as_tensor(again).zero_()
    gpu.streams.fetch.synchronize()


def a_copy_waits_for_the_allocation(gpu: FakeDevice, right: bool) -> None:
    """Compute may still use what was there before."""
    target, source = torch.empty(NUMEL, device=DEVICE), pinned()
    if right:
        gpu.streams.fetch.wait_for(gpu.streams.compute.record())
    with gpu.streams.fetch.running():
        copy(target, source)
    gpu.streams.compute.wait_for(gpu.streams.fetch.record())
    gpu.streams.fetch.synchronize()


def a_tensor_is_kept_for_a_copy(gpu: FakeDevice, right: bool) -> None:
    target, source = pinned(), on_device()
    offload = gpu.streams.offload
    offload.wait_for(gpu.streams.compute.record())
    with offload.running():
        copy(target, source)
    if right:
        offload.keep(source)
    del source
    on_device(2.0)
    offload.synchronize()


def a_tensor_is_held_until_compute_has_waited(gpu: FakeDevice, right: bool) -> None:
    target, source = pinned(), on_device()
    offload = gpu.streams.offload
    offload.wait_for(gpu.streams.compute.record())
    with offload.running():
        copy(target, source)
    if right:
        gpu.streams.compute.wait_for(offload.record())
    del source
    offload.synchronize()


def a_storage_is_emptied_after_the_copy(gpu: FakeDevice, right: bool) -> None:
    flat, source = torch.empty(NUMEL, device=DEVICE), pinned()
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(BYTES)
    gpu.streams.fetch.wait_for(gpu.streams.compute.record())
    with gpu.streams.fetch.running():
        copy(flat, source)
    if right:
        gpu.streams.compute.wait_for(gpu.streams.fetch.record())
    flat.untyped_storage().resize_(0)
    gpu.streams.fetch.synchronize()


def a_slab_s_room_is_taken_after_its_last_use(gpu: FakeDevice, right: bool) -> None:
    """One storage after the other has the same bytes of the slab."""
    slab, source = torch.empty(BYTES, dtype=torch.uint8, device=DEVICE), pinned()
    last_use = gpu.streams.compute.record()
    for _ in range(2):
        flat = torch.empty(NUMEL, device=DEVICE)
        flat.untyped_storage().resize_(0)
        part = apart(slab)
        if right:
            gpu.streams.fetch.wait_for(last_use)
        with gpu.streams.fetch.running():
            copy(part.view(torch.float32), source)
        exchange_pointers(flat, part)
        gpu.streams.compute.wait_for(gpu.streams.fetch.record())
        flat.sum()
        exchange_pointers(flat, part)
        last_use = gpu.streams.compute.record()
    gpu.streams.fetch.synchronize()


def the_cpu_stays_in_its_memory(gpu: FakeDevice, right: bool) -> None:
    values = pinned() if right else on_device()
    kernels.sum_of_squares(values.data_ptr(), DType.FP32, NUMEL)


def operands_are_of_one_device(gpu: FakeDevice, right: bool) -> None:
    torch.add(on_device(), on_device() if right else pinned())


def another_thread_waits(gpu: FakeDevice, right: bool) -> None:
    """What one thread knows to be over another does not know, unless it was told."""
    target, source = pinned(), on_device()
    gpu.streams.offload.wait_for(gpu.streams.compute.record())
    with gpu.streams.offload.running():
        copy(target, source)
    event, waited = gpu.streams.offload.record(), threading.Event()

    def wait() -> None:
        event.wait()
        waited.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not waited.is_set():  # which is not told of here
        pass
    if right:
        waited.wait()
    target.zero_()
    thread.join()
    gpu.streams.offload.synchronize()


def another_thread_copies(gpu: FakeDevice, right: bool) -> None:
    target, source = pinned(), on_device()

    def save() -> None:
        if right:
            gpu.streams.save.wait_for(gpu.streams.compute.record())
        with gpu.streams.save.running():
            copy(target, source)
        gpu.streams.save.record().wait()

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    target.tolist()
    gpu.streams.compute.wait_for(gpu.streams.save.record())


PROGRAMS: list[Program] = [
    compute_waits_for_a_copy,
    compute_waits_for_the_right_event,
    compute_waits_for_the_right_stream,
    a_copy_waits_for_compute,
    the_cpu_waits_for_what_it_reads,
    an_answer_is_heard,
    the_cpu_leaves_alone_what_is_copied,
    a_lease_is_given_back_after_the_copy,
    a_copy_waits_for_the_allocation,
    a_tensor_is_kept_for_a_copy,
    a_tensor_is_held_until_compute_has_waited,
    a_storage_is_emptied_after_the_copy,
    a_slab_s_room_is_taken_after_its_last_use,
    the_cpu_stays_in_its_memory,
    operands_are_of_one_device,
    another_thread_waits,
    another_thread_copies,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_wait_that_is_missing(program: Program) -> None:
    with FakeDevice() as gpu:
        program(gpu, True)
    with pytest.raises(NotOrdered) as caught, FakeDevice() as gpu:
        program(gpu, False)
    assert program.__name__ in str(caught.value)


def a_read_is_over_before_its_bytes_are_copied(
    gpu: FakeDevice, right: bool, space: SwapSpace, extent: StripedExtent, arena: Arena
) -> None:
    lease, target = arena.lease(BYTES, "read"), room(gpu).view(torch.uint8)
    ticket = space.swap_in(extent, lease)
    if right:
        ticket.wait()
    with gpu.streams.fetch.running():
        copy(target, as_tensor(lease)[:BYTES])
    gpu.streams.fetch.synchronize()
    ticket.wait()


def a_copy_is_over_before_its_lease_is_read_into(
    gpu: FakeDevice, right: bool, space: SwapSpace, extent: StripedExtent, arena: Arena
) -> None:
    lease, target = arena.lease(BYTES, "read"), room(gpu).view(torch.uint8)
    as_tensor(lease).zero_()
    with gpu.streams.fetch.running():
        copy(target, as_tensor(lease)[:BYTES])
    if right:
        gpu.streams.fetch.synchronize()
    space.swap_in(extent, lease).wait()
    gpu.streams.fetch.synchronize()


def a_gradient_is_there_before_it_is_written(
    gpu: FakeDevice, right: bool, space: SwapSpace, extent: StripedExtent, arena: Arena
) -> None:
    lease, source = arena.lease(PAGE, "written"), torch.ones(PAGE, dtype=torch.uint8, device=DEVICE)
    gpu.streams.offload.wait_for(gpu.streams.compute.record())
    with gpu.streams.offload.running():
        copy(as_tensor(lease), source)
    if right:
        gpu.streams.offload.record().wait()
    space.swap_out(extent, lease).wait()
    gpu.streams.offload.synchronize()


def a_slot_is_free_when_it_is_written(
    gpu: FakeDevice, right: bool, space: SwapSpace, extent: StripedExtent, arena: Arena
) -> None:
    gpu.transfer_answers = never
    lease = arena.lease(arena.capacity, "written")
    as_tensor(lease).zero_()
    ticket = space.swap_out(extent, lease, nbytes=PAGE)
    assert not ticket.done()
    if right:
        lease.retire(ticket)
    else:
        lease.release()
    as_tensor(arena.lease(PAGE, "next")).zero_()
    ticket.wait()
    assert ticket.done()


def nvme_reaches_host_memory_alone(
    gpu: FakeDevice, right: bool, space: SwapSpace, extent: StripedExtent, arena: Arena
) -> None:
    there = torch.empty(2 * PAGE, dtype=torch.uint8, device=DEVICE)
    on_a_page = SimpleNamespace(address=round_up(there.data_ptr()), nbytes=PAGE)
    space.swap_in(extent, arena.lease(PAGE, "read") if right else on_a_page).wait()


@pytest.mark.parametrize(
    "program",
    [
        nvme_reaches_host_memory_alone,
        a_read_is_over_before_its_bytes_are_copied,
        a_copy_is_over_before_its_lease_is_read_into,
        a_gradient_is_there_before_it_is_written,
        a_slot_is_free_when_it_is_written,
    ],
    ids=lambda program: program.__name__,
)
def test_a_transfer_that_is_not_waited_for(program: Callable[..., None], tmp_path: Path) -> None:
    def run(gpu: FakeDevice, right: bool) -> None:
        with AioContext(engine="threads") as aio:
            space = SwapSpace({"state": Section(PAGE, (tmp_path,))}, aio)
            extent, arena = space.allocate(PAGE, ("weight",), "state"), Arena.map(2 * PAGE, "host")
            space.swap_out(extent, lease := arena.lease(PAGE, "first")).wait()
            lease.release()
            program(gpu, right, space, extent, arena)
        space.close()

    with FakeDevice() as gpu:
        run(gpu, True)
    with pytest.raises(NotOrdered, match=program.__name__), FakeDevice() as gpu:
        run(gpu, False)


@pytest.mark.parametrize(
    "where",
    [
        "a hook of a module",
        "a hook of a tensor",
        pytest.param("a recomputed forward", marks=pytest.mark.slow),  # for which torch loads its compiler
    ],
)
@pytest.mark.parametrize("right", [True, False])
def test_nothing_that_runs_in_backward_is_missed(right: bool, where: str) -> None:
    """Hooks and recomputed forwards, which torch calls from its engine, wait for a copy or do not."""

    def use(gpu: FakeDevice, copied: Tensor) -> None:
        with gpu.streams.fetch.running():
            copy(copied, source)
        if right:
            gpu.streams.compute.wait_for(gpu.streams.fetch.record())
        copied.sum()

    def block(x: Tensor) -> Tensor:
        if recomputing:
            use(gpu, copied)
        return layer(x)

    def program() -> None:
        x = torch.ones(NUMEL, requires_grad=True, device=DEVICE)
        layer.requires_grad_()
        result: Tensor
        if where == "a recomputed forward":
            result = checkpoint(block, x, use_reentrant=False)
        elif where == "a hook of a module":
            layer.register_full_backward_hook(lambda *_: use(gpu, copied))
            result = layer(x)
        else:
            result = layer(x)
            result.register_hook(lambda _: use(gpu, copied))
        recomputing.append(True)
        result.sum().backward()
        gpu.streams.fetch.synchronize()

    recomputing: list[bool] = []
    with ExitStack() as stack:
        if not right:
            stack.enter_context(pytest.raises(NotOrdered, match=r"in use[^+]*"))
        gpu = stack.enter_context(FakeDevice())
        source, copied, layer = (
            pinned(),
            room(gpu),
            nn.LayerNorm(NUMEL, device=DEVICE),
        )
        program()


def test_what_makes_the_cpu_wait_is_told() -> None:
    with FakeDevice() as gpu:
        values, there = on_device(), pinned()
        copy(there, values)
        assert gpu.waits == []
        values.sum().item()
        values.tolist()
        there.copy_(values)
        torch.empty(NUMEL, device=DEVICE).copy_(torch.zeros(NUMEL), non_blocking=True)
        assert values.cpu().device == torch.device("cpu") and values.device == DEVICE
        assert values.float() is values and values.to(DEVICE) is values
        assert (there.to(DEVICE).device, values.new_empty(1).device) == (DEVICE, DEVICE)
    calls = [call for call, _ in gpu.waits]
    assert calls == [
        "_local_scalar_dense",
        "tolist",
        "copy_ from the device",
        "copy_ to the device",  # out of memory that is not pinned
        "_to_copy from the device",
        "_to_copy to the device",
    ]
