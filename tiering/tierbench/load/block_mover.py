"""A lane: one file under load. Some slots of memory, whose requests follow one another."""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Literal

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, Ticket
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.io_stats import FileStats
from tiering.storage.latencies import LatencyHistogram
from tiering.tierbench.load.block_order import Stretch, Walk
from tiering.tierbench.load.work_files import Ground
from tiering.tierbench.result import Settings
from tiering.tierbench.words import ReadWrite, is_random, reads, writes

# Of a request: fewer would keep Python busy on a fast drive, more would be waited for long on a slow one.
_REQUEST = 16 << 20  # bytes
_MOST_BLOCKS = 128
_NOISE = 8 << 20  # bytes: to make them takes as long as to write them
_WORD = 8


@dataclass
class Count:
    """What C has counted so far, in one direction of one file."""

    bytes: int
    ops: int
    latency: LatencyHistogram  # of a moment later: it may have more


def slots(settings: Settings, size: int) -> tuple[int, int]:
    """How many slots of memory a lane over ``size`` bytes has, and the blocks of each."""
    wanted = max(min(_REQUEST // settings.bs, _MOST_BLOCKS), -(-settings.iodepth // 4))
    blocks = max(1, min(wanted, size // settings.bs // 16))
    return -(-settings.iodepth // blocks) + 2, blocks  # one is waited for, one is about to be begun


def _fill(memory: memoryview) -> None:
    """With what neither compresses nor has two pages alike."""
    noise = os.urandom(_NOISE)
    for at in range(0, len(memory), _NOISE):
        part = memory[at : at + _NOISE]
        part[:] = noise[: len(part)]
    memory.cast("Q")[:: PAGE // _WORD] = memoryview(array("Q", range(len(memory) // PAGE)))


class Lane:
    """One file under load: some slots of memory, whose requests follow one another."""

    def __init__(
        self, ground: Ground, settings: Settings, aio: AioContext, file: int, *, job: int, place: int
    ) -> None:
        self.job, self.place = job, place
        self.reached = 0  # bytes from the start of the file that the last pass over it has covered
        self.failed: BaseException | None = None
        self._ground, self._settings, self.aio, self.file = ground, settings, aio, file
        self._bs = settings.bs
        count, self._blocks = slots(settings, ground.size)
        arena = Arena.map(count * self._blocks * self._bs, "tierbench")
        _fill(arena.memory)
        aio.register(arena)
        self._slots = [arena.lease(self._blocks * self._bs, "slot") for _ in range(count)]
        self._stamp = (job * len(ground.directories) + place) << 48  # no other lane comes to the same

    def counts(self, stats: FileStats) -> tuple[Count, Count]:
        """What was read and written so far, by the file's ``stats``."""
        return (
            Count(stats.read.bytes, stats.read.ops, self.aio.latencies(self.file, "read")),
            Count(stats.write.bytes, stats.write.ops, self.aio.latencies(self.file, "write")),
        )

    def flush(self) -> None:
        self.aio.flush(self.file).wait()

    def work(
        self, walks: dict[str, Walk], stop: threading.Event, ended: threading.Semaphore, once: bool
    ) -> None:
        """Keep requests under way until ``stop``, or ``once`` through the file. What fails is kept in ``failed``."""
        try:
            self._work(walks, stop, once)
        except BaseException as error:  # it is for the thread that waits for this one
            self.failed = error
            stop.set()
        finally:
            ended.release()

    def _work(self, walks: dict[str, Walk], stop: threading.Event, once: bool) -> None:
        if not walks:
            return
        # Never a block twice under way: O_DIRECT orders nothing, and a read would meet half of a write.
        most = min(len(self._slots), max(1, min(walk.count for walk in walks.values()) // self._blocks - 1))
        idle = self._slots[:most]
        in_flight: deque[tuple[Lease, Ticket, int]] = deque()
        share = self._settings.rwmixread if len(walks) > 1 else 100 if "read" in walks else 0
        drawn = 0  # of a hundred: reads are those that carry over
        self.reached = 0
        try:
            while not stop.is_set() and not (once and any(walk.passes for walk in walks.values())):
                if not idle:
                    slot, ticket, end = in_flight.popleft()
                    ticket.wait()
                    self.reached = max(self.reached, end)
                    idle.append(slot)
                    continue
                drawn += share
                kind: Literal["read", "write"] = "read" if drawn >= 100 else "write"
                drawn -= 100 * (kind == "read")
                stretch = walks[kind].take(self._blocks)
                if kind == "write" and not self._ground.may_write(stretch.nbytes):
                    break
                slot = idle.pop()
                ticket = self._prepare(kind, slot, stretch)
                in_flight.append((slot, ticket, stretch.offset + stretch.nbytes))
                ticket.begin()
        finally:
            self._end(in_flight, taking_back=stop.is_set())

    def walks(self, rw: ReadWrite, *, once: bool) -> dict[str, Walk]:
        """By what is done there: of a mix, reads have the first half of the file and writes the second."""
        ground = self._ground
        written = ground.written_once[self.job][self.place]
        blocks = (ground.size if once and rw == "write" else written) // self._bs
        half = blocks // 2 if reads(rw) and writes(rw) else 0
        seed = self.job * 1009 + self.place
        made: dict[str, Walk] = {}
        if not blocks:  # nothing was written, as after an interruption
            return made
        if reads(rw):
            made["read"] = Walk(0, half or blocks, self._bs, shuffled=is_random(rw), seed=2 * seed)
        if writes(rw):
            made["write"] = Walk(half, blocks - half, self._bs, shuffled=is_random(rw), seed=2 * seed + 1)
        return made

    def _prepare(self, kind: Literal["read", "write"], slot: Lease, stretch: Stretch) -> Ticket:
        if kind == "write" and self._settings.verify:
            self._stamp_pages(slot)
        if stretch.scattered:
            return self.aio.prepare_scattered(kind, self.file, slot, stretch.scattered, self._bs)
        return self.aio.prepare(kind, self.file, slot, stretch.offset, stretch.nbytes)

    def _stamp_pages(self, slot: Lease) -> None:
        """Make each page unlike all others that were written: one that did not arrive, or elsewhere, is then found."""
        first, pages = self._stamp, slot.nbytes // PAGE
        self._stamp += pages
        slot.view.cast("Q")[:: PAGE // _WORD] = memoryview(array("Q", range(first, first + pages)))

    def _end(self, in_flight: deque[tuple[Lease, Ticket, int]], *, taking_back: bool) -> None:
        """Take back what was not begun, from the last, if that is wanted, and wait for the rest."""
        taken_back = {ticket for _, ticket, _ in reversed(in_flight) if taking_back and ticket.cancel()}
        failed: SwapError | None = None
        for _, ticket, end in in_flight:
            try:
                ticket.wait()
                self.reached = max(self.reached, end)
            except SwapError as error:
                failed = failed or (None if ticket in taken_back else error)
        if failed is not None:
            raise failed
