"""A lane: one file under load, with slots of memory that carry one request after another."""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Literal

from tiering.errors import SwapError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.io_stats import FileStats
from tiering.storage.latencies import LatencyHistogram
from tiering.storage.tickets import Ticket
from tiering.tierbench.load.block_order import BlockOrder, BlockRange
from tiering.tierbench.load.work_files import WorkFiles
from tiering.tierbench.result import Settings
from tiering.tierbench.words import ReadWrite, is_random, reads, writes

# In one request of each job on a drive: at 16 MiB, Python takes as much CPU time per GB as the driver thread. This is
# also the memory of a slot.
_REQUEST_BYTES = 64 << 20
# In one of the pass that writes the file: a slow drive must complete some in the two seconds of that pass.
_FIRST_BYTES = 16 << 20
_REQUEST_BLOCKS = 128
_NOISE_BYTES = 8 << 20  # generating random bytes takes as long as writing them, so this much is repeated
_WORD_BYTES = 8


@dataclass
class Count:
    """The C library's counters of one direction of one file."""

    bytes: int
    ops: int
    # Read a moment after the other two, so it may hold more operations.
    latency: LatencyHistogram


def slots(settings: Settings, size: int) -> tuple[int, int]:
    """The number of memory slots of a lane over ``size`` bytes, and the blocks per slot."""
    request_bytes = _REQUEST_BYTES // settings.numjobs
    request_blocks = max(min(request_bytes // settings.bs, _REQUEST_BLOCKS), -(-settings.iodepth // 4))
    blocks = max(1, min(request_blocks, size // settings.bs // 16))
    # Two more than the depth needs: one request is waited for, and one is prepared.
    return -(-settings.iodepth // blocks) + 2, blocks


def _fill(memory: memoryview) -> None:
    """Fill with data that does not compress and has no two equal pages."""
    noise = os.urandom(_NOISE_BYTES)
    for at in range(0, len(memory), _NOISE_BYTES):
        part = memory[at : at + _NOISE_BYTES]
        part[:] = noise[: len(part)]
    memory.cast("Q")[:: PAGE // _WORD_BYTES] = memoryview(array("Q", range(len(memory) // PAGE)))


class Lane:
    """One file under load. A thread runs ``work``; other threads read ``reached`` and ``error``."""

    def __init__(
        self, work_files: WorkFiles, settings: Settings, aio: AioContext, file: int, *, job: int, place: int
    ) -> None:
        self.job, self.place = job, place
        # Bytes from the start of the file that the last pass has transferred.
        self.reached = 0
        self.error: BaseException | None = None
        self._work_files, self._settings, self.aio, self.file = work_files, settings, aio, file
        self._bs = settings.bs
        count, self._blocks = slots(settings, work_files.size)
        arena = Arena.map(count * self._blocks * self._bs, "tierbench")
        _fill(arena.memory)
        aio.register(arena)
        self._slots = [arena.lease(self._blocks * self._bs, "slot") for _ in range(count)]
        self._stamp = (
            job * len(work_files.directories) + place
        ) << 48  # a range of stamps that no other lane uses

    def counts(self, stats: FileStats) -> tuple[Count, Count]:
        """The counters of reads and of writes, from the file's ``stats``."""
        return (
            Count(stats.read.bytes, stats.read.ops, self.aio.latencies(self.file, "read")),
            Count(stats.write.bytes, stats.write.ops, self.aio.latencies(self.file, "write")),
        )

    def flush(self) -> None:
        self.aio.flush(self.file).wait()

    def work(
        self, orders: dict[str, BlockOrder], stop: threading.Event, finished: threading.Semaphore, once: bool
    ) -> None:
        """Keep requests in flight until ``stop``, or with ``once`` for one pass. Stores an exception in ``error``."""
        try:
            self._work(orders, stop, once)
        except BaseException as error:  # the thread that joins this one raises it
            self.error = error
            stop.set()
        finally:
            finished.release()

    def _work(self, orders: dict[str, BlockOrder], stop: threading.Event, once: bool) -> None:
        if not orders:
            return
        # A block is never in flight twice: O_DIRECT transfers have no order, so a read could see half of a write.
        slot_count = min(
            len(self._slots), max(1, min(walk.count for walk in orders.values()) // self._blocks - 1)
        )
        idle = self._slots[:slot_count]
        in_flight: deque[tuple[Lease, Ticket, int]] = deque()
        read_percent = self._settings.rwmixread if len(orders) > 1 else 100 if "read" in orders else 0
        most_blocks = self._blocks
        if once:
            most_blocks = min(most_blocks, max(_FIRST_BYTES // self._bs, -(-self._settings.iodepth // 2)))
        read_credit = 0  # grows by the percentage of reads per request; at 100 the request is a read
        self.reached = 0
        try:
            while not stop.is_set() and not (once and any(walk.passes for walk in orders.values())):
                if not idle:
                    slot, ticket, end = in_flight.popleft()
                    ticket.wait()
                    self.reached = max(self.reached, end)
                    idle.append(slot)
                    continue
                read_credit += read_percent
                kind: Literal["read", "write"] = "read" if read_credit >= 100 else "write"
                read_credit -= 100 * (kind == "read")
                blocks = orders[kind].next_blocks(most_blocks)
                if kind == "write" and not self._work_files.may_write(blocks.nbytes):
                    break
                slot = idle.pop()
                ticket = self._prepare(kind, slot, blocks)
                in_flight.append((slot, ticket, blocks.offset + blocks.nbytes))
                ticket.begin()
        finally:
            self._finish(in_flight, cancel=stop.is_set())

    def block_orders(self, rw: ReadWrite, *, once: bool) -> dict[str, BlockOrder]:
        """The block order of each direction. In a mix, reads use the first half of the file and writes the second."""
        work_files = self._work_files
        written = work_files.written_once[self.job][self.place]
        blocks = (work_files.size if once and rw == "write" else written) // self._bs
        half = blocks // 2 if reads(rw) and writes(rw) else 0
        seed = self.job * 1009 + self.place
        orders: dict[str, BlockOrder] = {}
        if not blocks:  # the preparation wrote nothing, for example after an interruption
            return orders
        if reads(rw):
            orders["read"] = BlockOrder(0, half or blocks, self._bs, shuffled=is_random(rw), seed=2 * seed)
        if writes(rw):
            orders["write"] = BlockOrder(
                half, blocks - half, self._bs, shuffled=is_random(rw), seed=2 * seed + 1
            )
        return orders

    def _prepare(self, kind: Literal["read", "write"], slot: Lease, blocks: BlockRange) -> Ticket:
        if kind == "write" and self._settings.verify:
            self._stamp_pages(slot)
        if blocks.scattered:
            return self.aio.prepare_scattered(kind, self.file, slot, blocks.scattered, self._bs)
        return self.aio.prepare(kind, self.file, slot, blocks.offset, blocks.nbytes)

    def _stamp_pages(self, slot: Lease) -> None:
        """Make each written page unique, so that verification finds a page that was lost or is in the wrong place."""
        first, pages = self._stamp, slot.nbytes // PAGE
        self._stamp += pages
        slot.view.cast("Q")[:: PAGE // _WORD_BYTES] = memoryview(array("Q", range(first, first + pages)))

    def _finish(self, in_flight: deque[tuple[Lease, Ticket, int]], *, cancel: bool) -> None:
        """Wait for all requests. With ``cancel``, first cancel those that the kernel does not have, the last first."""
        canceled = {ticket for _, ticket, _ in reversed(in_flight) if cancel and ticket.cancel()}
        first_error: SwapError | None = None
        for _, ticket, end in in_flight:
            try:
                ticket.wait()
                self.reached = max(self.reached, end)
            except SwapError as error:
                first_error = first_error or (None if ticket in canceled else error)
        if first_error is not None:
            raise first_error
