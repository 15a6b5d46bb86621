"""The bandwidth of each path, measured when swap space is made: it determines how much of each extent the path holds.

All paths are measured at the same time, as training uses them: a shared resource (a disk, a bus, a network, the cores)
counts as it will then, and two directories on one disk get half of its bandwidth each. Measuring one path after the
other would overestimate them, and take longer.

Each phase is an interval of time, not a number of bytes: no path waits for a slower one. A path begins with one small
block and gets more as they complete; when time is up, the blocks that have not started are cancelled. So a path of a
megabyte per second is measured in a second, not in a minute. First writes are not counted, because a file's new blocks
cost more than used ones. Then it counts writes of the same blocks, and then reads. The result is the lower of both
rates, because a training step reads and writes the same bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from tiering.errors import SwapError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.tickets import Ticket

SECONDS = 0.1  # of an interval; there are three
MAX_BYTES = 64 << 20  # written to a file, and moved in an interval
FASTEST_TO_SLOWEST = 64  # a larger ratio is an error of the measurement

_BLOCK = 256 << 10
_DEPTH = 24  # blocks in flight: enough for a disk's plateau


def weights(rates: Sequence[int]) -> list[int]:
    """Rates in bytes per second as weights: ratios are limited, and no weight is zero."""
    minimum = max(1, max(rates, default=1) // FASTEST_TO_SLOWEST)
    return [max(rate, minimum) for rate in rates]


def measure(aio: AioContext, files: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes per second of each (file of ``aio``, bytes at its start that may be overwritten, at least 4096).

    Takes about 0.3 s, whatever the number of files. Raises SwapError when a transfer fails.
    """
    lanes = [_Lane(aio, file, min(span, MAX_BYTES)) for file, span in files]
    # Python waits without the GIL, so one thread per path is enough.
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(_Lane.first_writes, lanes))
        write_rates = list(pool.map(_Lane.writes, lanes))
        read_rates = list(pool.map(_Lane.reads, lanes))
    return [min(rates) for rates in zip(write_rates, read_rates, strict=True)]


_Kind = Literal["read", "write"]


class _Lane:
    """One path under measurement. Every block has the same content, so it does not matter which write comes last."""

    def __init__(self, aio: AioContext, file: int, span: int) -> None:
        self._aio = aio
        self._file = file
        self._block = min(_BLOCK, span // PAGE * PAGE)
        self._span = span // self._block * self._block
        self._valid = self._block  # bytes that may be read: reads of unwritten blocks cost the disk nothing
        arena = Arena.map(_DEPTH * self._block, "bandwidth")
        content = os.urandom(self._block)  # not zeros, which some disks do not store
        self._buffers = [arena.lease(self._block, "bandwidth") for _ in range(_DEPTH)]
        for buffer in self._buffers:
            buffer.view[:] = content

    def first_writes(self) -> None:
        moved, _ = self._run("write", self._span, self._span)
        self._valid = min(self._span, moved)

    def writes(self) -> int:
        return self._rate("write")

    def reads(self) -> int:
        return self._rate("read")

    def _rate(self, kind: _Kind) -> int:
        moved, seconds = self._run(kind, self._valid, MAX_BYTES)
        return int(moved / seconds)

    def _run(self, kind: _Kind, span: int, max_bytes: int) -> tuple[int, float]:
        """Transfer blocks of [0, span), again and again, for an interval or ``max_bytes``; returns (bytes, seconds)."""
        began = time.monotonic()
        idle, in_flight = self._buffers[:], deque[tuple[Lease, Ticket]]()
        at = submitted = moved = 0
        try:
            while not submitted or (submitted < max_bytes and time.monotonic() - began < SECONDS):
                if idle and len(in_flight) * self._block <= moved:
                    buffer = idle.pop()
                    ticket = self._aio.prepare(kind, self._file, buffer, at, self._block)
                    in_flight.append((buffer, ticket))
                    ticket.begin()
                    submitted += self._block
                    at = (at + self._block) % span
                else:
                    buffer, ticket = in_flight.popleft()
                    moved += ticket.wait()
                    idle.append(buffer)
            if in_flight:
                moved += in_flight.popleft()[1].wait()  # the measurement needs at least one block
        finally:
            moved += _end([ticket for _, ticket in in_flight])
        return moved, time.monotonic() - began


def _end(tickets: Sequence[Ticket]) -> int:
    """Cancel the transfers that have not started, from the last, and wait for the others. Returns the bytes moved."""
    moved = 0
    cancelled = {ticket for ticket in reversed(tickets) if ticket.cancel()}
    failed: SwapError | None = None
    for ticket in tickets:
        try:
            moved += ticket.wait()
        except SwapError as error:
            failed = failed or (None if ticket in cancelled else error)
    if failed is not None:
        raise failed
    return moved
