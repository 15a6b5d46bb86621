"""Copies over the link of a device, and the slab in which they land: who waits for what, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.fake_device import DEVICE, FakeDevice, NotOrdered
from tests.fakes.gpu.streams import never
from tiering.storage.arena import PAGE, Arena
from zero3.device.link_copies import Copies, LinkStats
from zero3.device.room import room_for
from zero3.device.slab import DeviceSlab
from zero3.device.storages import apart, as_tensor, can_exchange, exchange_pointers
from zero3.device.streams import Event, Stream
from zero3.device.timeline import StallClock, Timeline

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[FakeDevice]:
    """A device that says of nothing that it is over before somebody has waited for it."""
    with FakeDevice(answers=never) as device:
        yield device


def link(gpu: FakeDevice) -> tuple[Copies, StallClock]:
    stalls = StallClock(Timeline(), gpu.streams)
    return Copies(gpu.streams, stalls), stalls


def test_copies_count_when_they_have_ended(gpu: FakeDevice) -> None:
    copies, _ = link(gpu)
    pinned = as_tensor(Arena.map(MIB, "host").lease(MIB, "copies"))
    there = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    events = [gpu.streams.compute.record()]
    first = copies.to_device(there, pinned, after=events)
    second = copies.to_device(there[:PAGE], pinned[:PAGE])
    back = copies.to_host(pinned, there, after=[second])
    assert copies.stats() == {"h2d": LinkStats(), "d2h": LinkStats()}
    first.wait()
    statistics = copies.stats()["h2d"]
    assert (statistics.bytes, statistics.copies) == (MIB, 1) and statistics.busy_seconds >= 0
    back.wait()
    assert [(each.bytes, each.copies) for each in copies.stats().values()] == [(MIB + PAGE, 2), (MIB, 1)]


@pytest.mark.parametrize("holds", [True, False])
def test_compute_waits_for_the_copy_that_holds_it(holds: bool) -> None:
    gpu = FakeDevice(answers=never)
    gpu.__enter__()
    copies, stalls = link(gpu)
    pinned = as_tensor(Arena.map(MIB, "host").lease(MIB, "copies"))
    there = torch.zeros(MIB, dtype=torch.uint8, device=DEVICE)
    copied = copies.to_device(there, pinned, after=[gpu.streams.compute.record()])
    if holds:
        copies.hold_compute(copied, "parameters")
    there.add_(1)
    if holds:
        gpu.streams.compute.synchronize()
        gpu.__exit__(None, None, None)
        assert stalls.seconds.keys() == {"copies of parameters"}
    else:
        with pytest.raises(NotOrdered):
            gpu.__exit__(None, None, None)


def work_on(stream: Stream) -> Event:
    """An event behind something that was queued."""
    with stream.running():
        torch.zeros(8, device=DEVICE)
    return stream.record()


def test_who_takes_room_of_the_slab_learns_its_last_uses(gpu: FakeDevice) -> None:
    work_on(gpu.streams.compute)
    slab = DeviceSlab(4 * PAGE, DEVICE, gpu.streams, "working")
    whole = slab.lease(4 * PAGE, "all", alone=True)
    (filled,) = slab.last_uses(whole)  # torch, which may have filled what it gave
    filled.wait()
    assert slab.last_uses(whole) == []
    slab.release(whole, early := work_on(gpu.streams.compute))
    low, high = (slab.lease(2 * PAGE, "half", alone=True) for _ in range(2))
    late = work_on(gpu.streams.fetch)
    slab.release(low, late)
    again = slab.lease(PAGE, "quarter", alone=True)
    assert (again.offset, slab.last_uses(again)) == (0, [early, late])
    assert slab.last_uses(high) == [early]
    early.wait()
    assert slab.last_uses(high) == []
    assert slab.last_uses(again) == [late]
    slab.forget_memory()
    assert slab.capacity == 4 * PAGE


def test_a_lease_of_the_slab_is_a_tensor_with_a_storage_of_its_own(gpu: FakeDevice) -> None:
    slab = DeviceSlab(4 * PAGE, DEVICE, gpu.streams, "working")
    _, second = slab.lease(PAGE, "a", alone=True), slab.lease(2 * PAGE, "b", alone=True)
    tensor = slab.tensor(second)
    assert (tensor.data_ptr(), tensor.untyped_storage().nbytes()) == (second.address, 2 * PAGE)
    flat = torch.empty(PAGE, dtype=torch.bfloat16, device=DEVICE)
    views, version = flat.view(2, -1), flat._version
    flat.untyped_storage().resize_(0)
    exchange_pointers(flat, tensor)
    assert views.data_ptr() == second.address
    assert flat._version == version
    exchange_pointers(flat, tensor)
    assert flat.untyped_storage().nbytes() == 0
    assert can_exchange(DEVICE)


def test_a_storage_over_the_slab_never_has_memory_of_its_own(gpu: FakeDevice) -> None:
    slab = DeviceSlab(4 * PAGE, DEVICE, gpu.streams, "working")
    tiers = SimpleNamespace(working=slab, device=DEVICE, streams=gpu.streams)
    other = slab.lease(PAGE, "other", alone=True)
    room = room_for(PAGE, torch.bfloat16, tiers, alone=True)  # type: ignore[arg-type]
    flat, view = room.flat, room.flat[8:16].view(2, 4)
    assert flat.data_ptr() == slab.address
    room.remove_bytes("blocks.0")
    assert flat.untyped_storage().nbytes() == 0
    assert room.acquire(at=None, wait=True)
    target, after = room.open()
    with gpu.streams.fetch.running():
        for event in after:
            gpu.streams.fetch.wait_for(event)
        target.view(torch.bfloat16).copy_(torch.arange(PAGE, device=DEVICE))
    gpu.streams.compute.wait_for(gpu.streams.fetch.record())
    room.attach()
    assert view.data_ptr() == slab.address + other.nbytes + 16
    assert view.flatten().tolist() == list(range(8, 16))
    view.sum()
    room.release(None)
    assert (flat.untyped_storage().nbytes(), slab.used) == (0, other.nbytes)
    again = slab.lease(3 * PAGE, "again", alone=True)
    assert len(slab.last_uses(again)) == 1  # what compute was told so far


def test_what_is_apart_keeps_the_memory_of_the_whole() -> None:
    whole = torch.arange(8, dtype=torch.uint8)
    part = apart(whole[4:6])
    del whole
    assert part.tolist() == [4, 5]


def test_gradients_on_their_way_are_bounded(
    start: Callable[..., Any], micro_batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU queues a backward long before the device gets there: it must not hold all gradients at once."""
    with FakeDevice(answers=never) as gpu:
        gpu.run_engines(monkeypatch)
        engine = start(offload_param="cpu", offload_optimizer="cpu", threshold=0, device_budget="64MiB")
        most, store = 0, engine._loop.of_rank.gradients
        receive = store._receive_finished

        def look() -> None:
            nonlocal most
            most = max(most, sum(transfer.source.numel() for transfer in store._transfers))
            receive()

        monkeypatch.setattr(store, "_receive_finished", look)
        for tokens, targets in micro_batches(2):
            engine.backward(engine(tokens.to(DEVICE), targets.to(DEVICE)))
            engine.step()
        bound = engine.plan.offload_window_bytes
        assert bound / 2 < most <= bound
        assert sum(group.shard.trainable_numel * 2 for group in engine._groups) > bound
        engine.close()
