"""Ranks whose devices have streams: which stream carries a collective, what it waits for, and who waits for it.

The device is written down, not there: CPU tensors and gloo behind it, so that values are right whatever the order.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tiering.config.training import DistributedConfig
from tiering.errors import ConfigError, DistributedError
from zero3.device.streams import Event, Stream, Streams
from zero3.device.timeline import StallClock, Timeline
from zero3.ranks.collectives import CLOSE_TIMEOUT, Collectives
from zero3.ranks.joining import join
from zero3.ranks.process_groups import check_apart

from .pool import Pool
from .together import eventually

Ranks = Callable[[int], Pool]


class WrittenEvent(Event):
    def __init__(self, name: str) -> None:
        self.name = name
        self.come = False

    def done(self) -> bool:
        return self.come

    def wait(self, timeout: float | None = None) -> int:
        self.come = True
        return 0

    def seconds_since(self, earlier: Event) -> float:
        return 0.0


class WrittenStream(Stream):
    def __init__(self, device: WrittenDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._events = Counter[str]()

    def record(self, *, timed: bool = False) -> Event:
        self._events["all"] += 1
        return WrittenEvent(f"{self.name} {self._events['all']}")

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, WrittenEvent)
        self._device.told.append(f"{self.name} waits for {event.name}")

    @contextmanager
    def running(self) -> Iterator[None]:
        self._device.within.append(self)
        yield
        self._device.within.pop()

    def keep(self, tensor: Tensor) -> None: ...

    def synchronize(self) -> None:
        self._device.told.append(f"the CPU waits for {self.name}")


class WrittenDevice(Streams):
    def __init__(self) -> None:
        self.told: list[str] = []
        self.within: list[WrittenStream] = []
        streams = {name: WrittenStream(self, name) for name in ("compute", "fetch", "gather", "reduce")}
        self.default, self.fetch, self.gather, self.reduce = streams.values()
        self.offload = self.update = self.save = self.fetch

    @property
    def compute(self) -> Stream:
        return self.within[-1] if self.within else self.default


@contextmanager
def watched(device: WrittenDevice) -> Iterator[None]:
    """Write down which stream each collective is told of, and that nobody leaves it to a stream of torch's."""
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def tell(name: str, collective: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, async_op: bool = False, **kwargs: object) -> object:
            if not async_op:
                device.told.append(f"{device.compute.name}: {name}")  # type: ignore[attr-defined]
            return collective(*args, async_op=async_op, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, gather, tell("all-gather", getattr(dist, gather)))
        patch.setattr(dist, "all_to_all_single", tell("exchange", dist.all_to_all_single))
        yield


def on_a_device(**config: float) -> tuple[Collectives, WrittenDevice]:
    device = WrittenDevice()
    stalls = StallClock(Timeline(), device)
    cpu = torch.device("cpu")
    world = join(cpu, 60.0)
    return Collectives(world, cpu, DistributedConfig(**config), stalls, device), device


def gather_and_exchange(rank: int) -> tuple[list[str], list[str], list[float], list[float]]:
    collectives, device = on_a_device()
    device.told.clear()
    with watched(device):
        whole = torch.zeros(4)
        copied = device.fetch.record()
        collectives.announce("gather 'a'", foreseen=True)
        gather = collectives.gather(whole, torch.full((2,), rank + 1.0), "gather 'a'", after=[copied])
        received, sent = torch.empty(4), torch.arange(4.0) + 10 * rank
        exchange = collectives.exchange(received, sent, "reduce 'b'")
        assert not collectives.is_done(gather), "ranks could differ in when"
        collectives.finish(exchange, "reduce")
        collectives.finish(gather, "gather")
    during = list(device.told)
    device.told.clear()
    collectives.close()
    return during, device.told, whole.tolist(), received.tolist()


def test_a_collective_waits_for_what_it_needs_and_compute_for_what_it_brings(ranks: Ranks) -> None:
    for rank, (during, afterwards, whole, received) in enumerate(ranks(2).run(gather_and_exchange)):
        assert during == [
            "gather waits for fetch 1",  # this rank's shard, and not for compute
            "gather: all-gather",
            "reduce waits for compute 3",  # the gradients
            "reduce: exchange",
            "compute waits for reduce 4",
            "compute waits for gather 4",
        ]
        assert afterwards == ["the CPU waits for gather", "the CPU waits for reduce"]
        assert whole == [1.0, 1.0, 2.0, 2.0]
        assert received == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]


def lose_rank_1(rank: int) -> tuple[str, bool, float]:
    collectives, _ = on_a_device(silence=5)
    if rank == 1:
        collectives.peers.fail(ValueError("no such token"))
        collectives.close()
        return "", True, 0.0

    def aborted(*_: object, **__: object) -> None:
        raise dist.DistBackendError("NCCL communicator was aborted on rank 0")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", aborted)
        with pytest.raises(DistributedError) as first:
            collectives.exchange(torch.empty(2), torch.zeros(2), "reduce 'b'")
    eventually(lambda: collectives._groups._severed)  # by the thread that watches
    with pytest.raises(DistributedError) as then:
        collectives.check()
    began = time.monotonic()
    collectives.close()
    return str(first.value), str(then.value) == str(first.value), time.monotonic() - began


def test_an_aborted_communicator_is_explained_by_the_rank_that_was_lost(ranks: Ranks) -> None:
    (message, same, seconds), _ = ranks(2).run(lose_rank_1)
    assert "rank 1 (host" in message
    assert "ValueError: no such token" in message
    assert same
    assert seconds < CLOSE_TIMEOUT / 2, "it has waited for ranks that do not come"


def fail_here(rank: int) -> list[str]:
    collectives, device = on_a_device()
    if rank == 0:
        collectives.report_failure("backward", ValueError("no such token"))
    else:
        eventually(lambda: collectives.peers.broken)
    device.told.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives._groups, "sever", lambda: device.told.append("connections are broken"))
        collectives.settle()
    reasons = list(device.told)
    collectives.close()
    return reasons


def test_a_rank_that_has_failed_does_not_wait_for_its_own_device(ranks: Ranks) -> None:
    """Others do not join in what it still waits for, and it is told of no failure but its own."""
    ends = ["connections are broken", "the CPU waits for gather", "the CPU waits for reduce"]
    assert ranks(2).run(fail_here) == [ends, ends]


def forget(rank: int) -> tuple[bool, str]:
    collectives, _ = on_a_device()
    peers, reference = collectives.peers, weakref.ref(collectives)
    del collectives
    gc.collect()
    return reference() is None, peers._heartbeat._state


def test_who_watches_over_ranks_keeps_no_engine(ranks: Ranks) -> None:
    assert ranks(2).run(forget) == [(True, "closed")] * 2


def test_ranks_that_share_a_gpu_are_told_before_nccl_is_asked() -> None:
    check_apart([("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")])
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 have the same GPU of host b.*--nproc-per-node"):
        check_apart([("a", "0"), ("b", "0"), ("a", "1"), ("b", "0")])
