"""The bandwidth of each path, measured when swap space is made: it determines how much of each extent the path holds.

All paths are measured at the same time, as training uses them: a shared resource (a disk, a bus, a network, the cores)
counts as it will then, and two directories on one disk get half of its bandwidth each. Measuring one path after the
other would overestimate them, and take longer.

Each phase is an interval of time, not a number of bytes: no path waits for a slower one. A path begins with one small
request and gets larger ones as they complete. C divides a request into blocks and keeps its queue full, so Python does
not limit a fast path: two drives of 7 and 14 GB/s are told apart. A path of a megabyte per second is measured in a
second, not in a minute. First writes are not counted, because a file's new blocks cost more than used ones. Then it
counts writes of the same blocks, and then reads. The result is the lower of both rates, because a training step reads
and writes the same bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from tiering.errors import SwapError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.tickets import Ticket

SECONDS = 0.1  # of an interval; there are three
# Written to a file, and moved in an interval: more than the memory of most drives.
MAX_BYTES = 1 << 30
MAX_CHECKSUMMED_BYTES = 64 << 20  # the same if pages have checksums, which take host memory
FASTEST_TO_SLOWEST = 64  # a larger ratio is an error of the measurement

_BLOCK = 256 << 10  # of the first request; the others are multiples of it
# 2 ms of a drive of 14 GB/s: Python's part is small. Two are in flight, so that the queue stays full.
_REQUEST = 32 << 20
_IN_FLIGHT = 2


def weights(rates: Sequence[int]) -> list[int]:
    """Rates in bytes per second as weights: ratios are limited, and no weight is zero."""
    minimum = max(1, max(rates, default=1) // FASTEST_TO_SLOWEST)
    return [max(rate, minimum) for rate in rates]


def max_bytes(aio: AioContext) -> int:
    """The most bytes at the start of a file that ``measure`` writes."""
    return MAX_CHECKSUMMED_BYTES if aio.verifies else MAX_BYTES


def measure(aio: AioContext, files: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes per second of each (file of ``aio``, bytes at its start that may be overwritten, at least 4096).

    Takes about 0.3 s, whatever the number of files. Raises SwapError when a transfer fails.
    """
    most = max_bytes(aio)
    spans = [(file, min(span, most) // PAGE * PAGE) for file, span in files]
    # Every block of a file has the same content, at the same place of the memory: so files may share the memory, and it
    # does not matter which write comes last.
    memory = {block: _content(block) for block in {min(_BLOCK, span) for _, span in spans}}
    lanes = [_Lane(aio, file, span, memory) for file, span in spans]
    # Python waits without the GIL, so one thread per path is enough.
    with ThreadPoolExecutor(len(lanes)) as pool:
        list(pool.map(_Lane.first_writes, lanes))
        write_rates = list(pool.map(_Lane.writes, lanes))
        read_rates = list(pool.map(_Lane.reads, lanes))
    return [min(rates) for rates in zip(write_rates, read_rates, strict=True)]


_Kind = Literal["read", "write"]


def _content(block: int) -> Lease:
    """Memory of a request: ``block`` bytes, again and again. Not zeros, which some disks do not store."""
    count = _REQUEST // block if block == _BLOCK else 1
    lease = Arena.map(count * block, "bandwidth").lease(count * block, "bandwidth")
    lease.view[:] = os.urandom(block) * count
    return lease


class _Lane:
    """One path under measurement, of which [0, ``span``) may be overwritten."""

    def __init__(self, aio: AioContext, file: int, span: int, memory: Mapping[int, Lease]) -> None:
        self._aio = aio
        self._file = file
        self._block = min(_BLOCK, span)
        self._span = span // self._block * self._block
        self._memory = memory[self._block]
        # Bytes that may be read: reads of unwritten blocks cost the disk nothing.
        self._valid = self._block

    def first_writes(self) -> None:
        moved, _ = self._run("write", self._span, self._span)
        self._valid = min(self._span, moved)

    def writes(self) -> int:
        return self._rate("write")

    def reads(self) -> int:
        return self._rate("read")

    def _rate(self, kind: _Kind) -> int:
        moved, seconds = self._run(kind, self._valid, max_bytes(self._aio))
        return int(moved / seconds)

    def _run(self, kind: _Kind, span: int, most: int) -> tuple[int, float]:
        """Transfer [0, span), again and again, for an interval or ``most`` bytes; returns (bytes, seconds)."""
        began = time.monotonic()
        in_flight = deque[Ticket]()
        at = submitted = moved = 0
        try:
            while not submitted or (submitted < most and time.monotonic() - began < SECONDS):
                if not submitted or (moved and len(in_flight) < _IN_FLIGHT):
                    # No more in flight than was moved: when time is up, the end of a slow path's transfers is near.
                    size = min(round_up(moved // _IN_FLIGHT, self._block), self._memory.nbytes, span - at)
                    size = max(size, self._block)
                    ticket = self._aio.prepare(kind, self._file, self._memory, at, size)
                    in_flight.append(ticket)
                    ticket.begin()
                    submitted += size
                    at = (at + size) % span
                else:
                    moved += in_flight.popleft().wait()
            if in_flight:
                moved += in_flight.popleft().wait()  # the measurement needs at least one block
        finally:
            moved += _end(in_flight)
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
