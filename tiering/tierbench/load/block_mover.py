"""A lane: one file under load, with slots of memory that carry one request after another."""

from __future__ import annotations

import errno
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
from tiering.storage.request import FilePiece
from tiering.storage.tickets import Ticket
from tiering.tierbench.load.block_order import BlockOrder, BlockRange
from tiering.tierbench.load.countdown import Countdown
from tiering.tierbench.load.work_files import WorkFiles
from tiering.tierbench.result import Settings
from tiering.tierbench.words import ReadWrite, is_random, reads, writes

# The memory of a slot of each job on a drive, in bytes and in blocks.
_SLOT_BYTES = 64 << 20
_SLOT_BLOCKS = 128
# A request uses the memory of its slot so many times. Each one costs a tenth of a millisecond of Python, because its
# thread wakes up with cold caches: at 512 MiB, a twentieth of the CPU time of the driver thread.
_ROUNDS = 8
# In a request of the pass that writes the file: a slow drive must complete some in the two seconds of that pass.
_FIRST_BYTES = 16 << 20
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
    slot_bytes = _SLOT_BYTES // settings.numjobs
    slot_blocks = max(min(slot_bytes // settings.bs, _SLOT_BLOCKS), -(-settings.iodepth // 4))
    blocks = max(1, min(slot_blocks, size // settings.bs // 16))
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
        # Requests, the oldest first, with the end of each in the file.
        self._in_flight: deque[tuple[Lease, Ticket, int]] = deque()
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
        self,
        orders: dict[str, BlockOrder],
        stop: threading.Event,
        running: Countdown,
        once: bool,
    ) -> None:
        """Keep requests in flight until ``stop``, or with ``once`` for one pass. Stores an exception in ``error``."""
        try:
            self._work(orders, stop, once)
        except BaseException as error:  # the thread that joins this one raises it
            self.error = error
            stop.set()
        finally:
            running.count_down()

    def _work(self, orders: dict[str, BlockOrder], stop: threading.Event, once: bool) -> None:
        if not orders:
            return
        read_percent = self._settings.rwmixread if len(orders) > 1 else 100 if "read" in orders else 0
        fewest = min(walk.count for walk in orders.values())
        most_blocks = self._blocks
        if once:
            most_blocks = min(most_blocks, max(_FIRST_BYTES // self._bs, -(-self._settings.iodepth // 2)))
        elif self._may_reuse_memory(orders, read_percent):
            most_blocks = max(most_blocks, min(_ROUNDS * most_blocks, fewest // (len(self._slots) + 1)))
        # A block is never in flight twice: O_DIRECT transfers have no order, so a read could see half of a write.
        slot_count = min(len(self._slots), max(1, fewest // most_blocks - 1))
        idle = self._slots[:slot_count]
        read_credit = 0  # grows by the percentage of reads per request; at 100 the request is a read
        self.reached = 0
        try:
            while not stop.is_set() and not (once and any(walk.passes for walk in orders.values())):
                if not idle:
                    idle.append(self._wait_for_first())
                    continue
                read_credit += read_percent
                kind: Literal["read", "write"] = "read" if read_credit >= 100 else "write"
                read_credit -= 100 * (kind == "read")
                blocks = orders[kind].next_blocks(most_blocks)
                if kind == "write" and not self._work_files.may_write(blocks.nbytes):
                    break
                slot = idle.pop()
                ticket = self._prepare(kind, slot, blocks)
                self._in_flight.append((slot, ticket, blocks.offset + blocks.nbytes))
                ticket.begin()
        except SwapError as error:
            if not (stop.is_set() and error.errno == errno.ECANCELED):
                raise
        finally:
            self._finish(cancel=stop.is_set())

    def _wait_for_first(self) -> Lease:
        """Wait for the oldest request; returns its slot."""
        slot, ticket, end = self._in_flight[0]
        try:
            ticket.wait()
        finally:
            # Not before: ``cancel`` must find it here.
            self._in_flight.popleft()
        self.reached = max(self.reached, end)
        return slot

    def cancel(self) -> None:
        """Cancel the rest of all requests, the last first. Any thread may call this, after ``stop`` is set."""
        # A copy in one step of the interpreter: the lane's thread changes the queue.
        for _, ticket, _ in reversed(tuple(self._in_flight)):
            ticket.cancel()

    def _may_reuse_memory(self, orders: dict[str, BlockOrder], read_percent: int) -> bool:
        """Whether a request may be longer than its slot, so that its blocks use the same memory.

        Not with ``verify``: a late block would meet the bytes of another one. Not in shuffled requests, whose pieces
        have one block each. Requests stay short in an uneven mix, so that a short interval has the right mix (in an
        even one, the C library alternates between both directions), and where ``max_write`` limits them.
        """
        shuffled = any(walk.shuffled for walk in orders.values())
        limited = "write" in orders and self._work_files.max_write is not None
        return not (self._settings.verify or shuffled or limited) and read_percent in (0, 50, 100)

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
        pieces = [
            FilePiece(self.file, 0, blocks.offset + at, min(slot.nbytes, blocks.nbytes - at))
            for at in range(0, blocks.nbytes, slot.nbytes)
        ]
        return self.aio.prepare_vector(kind, slot, pieces)

    def _stamp_pages(self, slot: Lease) -> None:
        """Make each written page unique, so that verification finds a page that was lost or is in the wrong place."""
        first, pages = self._stamp, slot.nbytes // PAGE
        self._stamp += pages
        slot.view.cast("Q")[:: PAGE // _WORD_BYTES] = memoryview(array("Q", range(first, first + pages)))

    def _finish(self, *, cancel: bool) -> None:
        """Wait for all requests. With ``cancel``, first cancel those that the kernel does not have."""
        if cancel:
            self.cancel()
        first_error: SwapError | None = None
        while self._in_flight:
            try:
                self._wait_for_first()
            except SwapError as error:
                if not (cancel and error.errno == errno.ECANCELED):
                    first_error = first_error or error
        if first_error is not None:
            raise first_error
