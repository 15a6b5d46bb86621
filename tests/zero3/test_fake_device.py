"""The fake device finds each wait that is missing, and nothing where none is: otherwise no test of order says anything.

Each pair is one mistake and the program without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.kernels import DType
from tiering.arena import Arena
from zero3.exchange import apart, exchange_pointers
from zero3.tiers import as_tensor

from .fake.streams import never
from .fake_device import DEVICE, FakeDevice, NotOrdered

Program = Callable[[FakeDevice, bool], None]  # as it is right, or with its mistake

NUMEL = 64
BYTES = 4 * NUMEL


def on_device(value: float = 1.0) -> Tensor:
    return torch.full((NUMEL,), value, device=DEVICE)


def pinned(value: float = 1.0) -> Tensor:
    return torch.empty(NUMEL, pin_memory=True).fill_(value)


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def compute_waits_for_a_copy(gpu: FakeDevice, right: bool) -> None:
    target, source = torch.empty(NUMEL, device=DEVICE), pinned()
    fetch = gpu.streams.fetch
    with fetch.running():
        copy(target, source)
    if right:
        gpu.streams.compute.wait_for(fetch.record())
    target.sum()
    fetch.synchronize()


def compute_waits_for_the_right_event(gpu: FakeDevice, right: bool) -> None:
    target, source = torch.empty(NUMEL, device=DEVICE), pinned()
    fetch = gpu.streams.fetch
    early = fetch.record()
    with fetch.running():
        copy(target, source)
    late = fetch.record()
    gpu.streams.compute.wait_for(late if right else early)
    target.sum()
    fetch.synchronize()


def compute_waits_for_the_right_stream(gpu: FakeDevice, right: bool) -> None:
    target, source = torch.empty(NUMEL, device=DEVICE), pinned()
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
    target, source = torch.empty(NUMEL, device=DEVICE), pinned()
    with gpu.streams.fetch.running():
        copy(target, source)
    if right:
        gpu.streams.fetch.record().wait()
    source.fill_(2.0)
    gpu.streams.fetch.synchronize()


def a_lease_is_given_back_after_the_copy(gpu: FakeDevice, right: bool) -> None:
    arena = Arena.map(4096, "host")
    target = torch.empty(NUMEL, device=DEVICE)
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
