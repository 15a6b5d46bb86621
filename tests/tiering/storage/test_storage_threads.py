"""Sixteen threads on shared swap files: whatever they submit, wait for and cancel, bytes and counters are right."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import Section, SwapSpace
from tiering.storage.tickets import Ticket

THREADS, TURNS, PAGES = 16, 40, 8


@dataclass
class Shared:
    """An extent that every thread writes and reads, and what it holds once all submitted so far is over."""

    space: SwapSpace
    extent: StripedExtent
    lock: threading.Lock  # around a submission and the model's: this order is the one that counts
    content: bytearray


@dataclass(eq=False)
class Transfer:
    ticket: Ticket
    lease: Lease
    slab: int
    expected: bytes | None  # of a read
    cancelled: bool = False


class Worker:
    def __init__(self, rank: int, context: AioContext, shared: list[Shared]) -> None:
        self.rng = random.Random(rank)
        self.context = context
        self.shared = shared
        self.arena = Arena.map(32 * PAGES * PAGE, "host")
        self.open: list[Transfer] = []
        self.moved = {(slab, kind): 0 for slab in range(len(shared)) for kind in ("read", "write")}
        self.failures: list[BaseException] = []

    def run(self) -> None:
        try:
            for _ in range(TURNS):
                self.submit()
                while len(self.open) > self.rng.randrange(8):
                    self.look_at(self.rng.choice(self.open))
            while self.open:
                self.look_at(self.open[0])
        except BaseException as error:
            self.failures.append(error)

    def submit(self) -> None:
        number, start = self.rng.randrange(len(self.shared)), self.rng.randrange(PAGES)
        nbytes = self.rng.randint(1, PAGES - start) * PAGE
        shared, lease, priority = (
            self.shared[number],
            self.arena.lease(nbytes, "transfer"),
            self.rng.randrange(3),
        )
        here = slice(start * PAGE, start * PAGE + nbytes)
        if self.rng.random() < 0.5:
            lease.view[:] = self.rng.randbytes(64) * (nbytes // 64)
            with shared.lock:
                ticket = shared.space.swap_out(shared.extent, lease, offset=here.start, priority=priority)
                shared.content[here] = lease.view
            self.open.append(Transfer(ticket, lease, number, None))
        else:
            with shared.lock:
                ticket = shared.space.swap_in(shared.extent, lease, offset=here.start, priority=priority)
                expected = bytes(shared.content[here])
            self.open.append(Transfer(ticket, lease, number, expected))

    def look_at(self, transfer: Transfer) -> None:
        how = self.rng.randrange(4)
        if how == 0 and transfer.expected is not None:  # a write that is cancelled poisons what follows
            transfer.cancelled |= transfer.ticket.cancel()
        elif how == 1:
            first = self.context.wait_any([each.ticket for each in self.open])
            (transfer,) = [each for each in self.open if each.ticket is first]
            assert first.done()
        elif how == 2:
            with suppress(TimeoutError, SwapError):
                transfer.ticket.wait(0.001)
        self.settle(transfer)

    def settle(self, transfer: Transfer) -> None:
        self.open.remove(transfer)
        if transfer.cancelled:
            with pytest.raises(SwapError, match="ECANCELED"):
                transfer.ticket.wait()
        else:
            assert transfer.ticket.wait() == transfer.lease.nbytes
            kind = "write" if transfer.expected is None else "read"
            self.moved[transfer.slab, kind] += transfer.lease.nbytes
            if transfer.expected is not None:
                assert bytes(transfer.lease.view) == transfer.expected
        transfer.lease.release()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "some late"])
def test_sixteen_threads_share_extents(engine: str, tmp_path: Path, late: bool) -> None:
    """Every read sees the last write that was submitted before it; the counters are the sum of the requests."""
    some = tuple(Fault("any", first=n, count=3, delay=0.002) for n in range(1, 2000, 20))
    context = AioContext(
        engine=engine, block_size=PAGE, queue_depth=8, fault=FaultPlan(some) if late else None
    )
    places: list[SwapSpace] = []
    try:
        shared = []
        for index in range(2):
            places.append(SwapSpace({"state": Section(PAGES * PAGE, (tmp_path,))}, context))
            extent = places[-1].allocate(PAGES * PAGE, (f"shared{index}",), "state")
            shared.append(Shared(places[-1], extent, threading.Lock(), bytearray(PAGES * PAGE)))
        workers = [Worker(rank, context, shared) for rank in range(THREADS)]
        before = context.stats()
        threads = [threading.Thread(target=worker.run) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [failure for worker in workers for failure in worker.failures] == []
        for index, (then, now) in enumerate(zip(before, context.stats(), strict=True)):
            for kind in ("read", "write"):
                moved = getattr(now, kind).bytes - getattr(then, kind).bytes
                # Of a read that was cancelled, some blocks may have been read.
                assert moved >= sum(worker.moved[index, kind] for worker in workers) > 0
                assert kind == "read" or moved == sum(worker.moved[index, kind] for worker in workers)
                assert moved == (getattr(now, kind).ops - getattr(then, kind).ops) * PAGE
                assert (getattr(now, kind).in_flight, getattr(now, kind).errors) == (0, 0)
        lease = workers[0].arena.lease(PAGES * PAGE, "in")
        for each in shared:
            each.space.swap_in(each.extent, lease).wait()
            assert lease.view == each.content
    finally:
        context.close()
        for place in places:
            place.close()
