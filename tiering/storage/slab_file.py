"""Slabs: a swap file cut into extents, whose transfers are kept in order.

**Ordering.** ``O_DIRECT`` orders nothing: a write and a read of the same bytes that are in flight together may run in
either order. Each extent therefore keeps its transfers in flight, and a new transfer that conflicts (they overlap and
one of them writes) is submitted to run *after* the earlier ones. A failed write marks its range: until the range is
written again, reading it raises the error of the write instead of returning stale bytes.

**Signals.** A signal handler may raise between any two statements. So a transfer is stored in its extent before it is
submitted: ``settle`` then waits for every transfer that the kernel has, also if its submission raised. A stored
transfer that was never submitted is harmless, and the next transfer of the extent removes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tiering._text import shorten
from tiering.errors import SwapError, SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.arena import FreeRanges, round_up
from tiering.storage.request import Buffer
from tiering.storage.swap_file import SwapFile, check_directory
from tiering.storage.tickets import Ticket

_Failure = tuple[int, int, SwapError]
"""The first byte of a range of an extent, its end, and the error of the write that did not replace it."""


@dataclass(frozen=True)
class _Transfer:
    ticket: Ticket
    start: int
    end: int
    writes: bool
    replaces: list[_Failure]  # failures that this write clears, if it was submitted

    def conflicts(self, start: int, end: int, writes: bool) -> bool:
        return self.start < end and start < self.end and (writes or self.writes)


@dataclass(eq=False)
class Extent:
    """A range of a slab file: ``nbytes`` at ``offset``, both multiples of 4096. ``names`` are the tensors in it."""

    offset: int
    nbytes: int
    names: tuple[str, ...]
    in_flight: list[_Transfer] = field(default_factory=list, repr=False)
    failed: list[_Failure] = field(default_factory=list, repr=False)


class ExtentRange(NamedTuple):
    """Bytes [start, end) of an extent, for one transfer."""

    extent: Extent
    start: int
    end: int


class SlabFile:
    """``nbytes`` of swap space in ``directory``, served through ``aio`` as its file number ``file``.

    Raises SwapSpaceError when the directory is missing, not writable, held in memory (tmpfs) or too full.
    Thread-safe.
    """

    def __init__(
        self, directory: Path, nbytes: int, aio: AioContext, *, allow_memory_file_system: bool = False
    ) -> None:
        self.directory = check_directory(directory, allow_memory_file_system=allow_memory_file_system)
        self.aio = aio
        self._lock = threading.Lock()
        self._swap = SwapFile(self.directory, round_up(nbytes))
        try:
            self.file = aio.add_file(self._swap.fd, direct=self._swap.direct, name=str(self.directory))
        except BaseException:
            # The context does not have the descriptor, so nothing uses it.
            self._swap.close()
            raise
        self._free = FreeRanges(self._swap.nbytes)
        self.used = 0

    @property
    def fd(self) -> int:
        """The descriptor, -1 once closed."""
        return self._swap.fd

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return self._swap.direct

    @property
    def capacity(self) -> int:
        """Bytes reserved."""
        return self._swap.nbytes

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that ``allocate`` can make now."""
        with self._lock:
            return self._free.largest

    def resize(self, nbytes: int) -> None:
        """Change the size to ``nbytes`` (rounded up to 4096), before the first extent is allocated."""
        assert not self.used, "a slab with extents is not resized"
        self._swap.resize(round_up(nbytes))
        self._free = FreeRanges(self._swap.nbytes)

    def grow(self, nbytes: int) -> None:
        """Reserve ``nbytes`` (rounded up to 4096) more. Raises SwapSpaceError when there is too little space."""
        size = round_up(nbytes)
        with self._lock:
            end = self._swap.nbytes
            self._swap.resize(end + size)
            self._free.free(end, size)

    def allocate(self, nbytes: int, names: tuple[str, ...]) -> Extent:
        """An extent of ``nbytes`` rounded up to 4096, first fit. Raises SwapSpaceError when none is left."""
        if nbytes <= 0:
            raise ValueError(f"an extent has at least one byte, not {nbytes} ({shorten(names)})")
        size = round_up(nbytes)
        # Extents of two threads must not overlap: their transfers would not be ordered.
        with self._lock:
            start = self._free.allocate(size)
            if start is not None:
                self.used += size
                return Extent(start, size, names)
        raise SwapSpaceError(
            f"swap file in {self.directory}: no extent of {size} bytes left for {shorten(names)}"
            f" ({self.used} of {self.capacity} bytes used); raise nvme_budget"
        )

    def free(self, extent: Extent) -> None:
        """Free an extent, after its transfers in flight; their failures are dropped.

        It has zero bytes afterwards, so that later transfers of it are refused: its range may have a new owner.
        """
        # First: a transfer that is still in flight would conflict with transfers of the next owner of the range.
        self.settle(extent)
        with self._lock:
            # Before the range is free: an owner that still has the extent can begin no transfer any more.
            nbytes, extent.nbytes = extent.nbytes, 0
            if nbytes:
                self._free.free(extent.offset, nbytes)
                self.used -= nbytes

    def swap_in(
        self, extent: Extent, buffer: Buffer, *, offset: int = 0, nbytes: int | None = None, priority: int = 0
    ) -> Ticket:
        """Start reading ``nbytes`` (default: the buffer's) at ``offset`` of ``extent`` into ``buffer``.

        A signal handler may raise before the caller has the ticket: after an exception, ``settle`` the extent before
        the memory is released.
        """
        return self._start(extent, buffer, offset, nbytes, priority, writes=False)

    def swap_out(
        self, extent: Extent, buffer: Buffer, *, offset: int = 0, nbytes: int | None = None, priority: int = 0
    ) -> Ticket:
        """Start writing ``nbytes`` (default: the buffer's) from ``buffer`` at ``offset`` of ``extent``."""
        return self._start(extent, buffer, offset, nbytes, priority, writes=True)

    def settle(self, extent: Extent) -> None:
        """Wait for all transfers of ``extent``. A failed write is raised by the next read of its range."""
        # A copy: transfers that other threads begin meanwhile are not waited for.
        for transfer in tuple(extent.in_flight):
            if transfer.ticket.has_begun:
                with contextlib.suppress(SwapError):
                    transfer.ticket.wait()

    def close(self) -> None:
        """Close the descriptor; the kernel frees the space. The I/O context must have been closed first."""
        self._swap.close()

    def _start(
        self, extent: Extent, buffer: Buffer, offset: int, nbytes: int | None, priority: int, *, writes: bool
    ) -> Ticket:
        length = min(buffer.nbytes, extent.nbytes - offset) if nbytes is None else nbytes
        if offset < 0 or length <= 0 or offset + length > extent.nbytes or length > buffer.nbytes:
            raise ValueError(
                f"transfer [{offset}, {offset + length}) does not fit an extent of {extent.nbytes} bytes and a"
                f" buffer of {buffer.nbytes} bytes ({shorten(extent.names)})"
            )
        # Under the lock: only a submitted ticket can be named by the next transfer that conflicts with this one.
        with self._lock:
            return begin_in_order(
                [ExtentRange(extent, offset, offset + length)],
                writes,
                lambda after: self.aio.prepare(
                    "write" if writes else "read",
                    self.file,
                    buffer,
                    extent.offset + offset,
                    length,
                    priority=priority,
                    after=after,
                    names=extent.names,
                ),
            )


def begin_in_order(
    ranges: Sequence[ExtentRange], writes: bool, prepare: Callable[[Sequence[Ticket]], Ticket]
) -> Ticket:
    """Submit the transfer of ``ranges`` that ``prepare`` makes, after the tickets that it gets.

    Raises the error of an earlier write that failed, if this transfer would read bytes that it did not replace. The
    caller holds the lock of the extents.
    """
    replaced: list[list[_Failure]] = []
    after: dict[Ticket, None] = {}
    for extent, start, end in ranges:
        # First: the failure of a write that has ended must be known before a read of its range is let through.
        _settle(extent)
        overlapping = [failure for failure in extent.failed if failure[0] < end and start < failure[1]]
        if overlapping and not writes:
            raise overlapping[0][2].again()
        replaced.append(overlapping)
        # A read after a write, a write after a read, and a write after a write. Two reads may run side by side.
        after |= {t.ticket: None for t in extent.in_flight if t.conflicts(start, end, writes)}
    ticket = prepare(tuple(after))
    for (extent, start, end), failures in zip(ranges, replaced, strict=True):
        # Before the submission: see Signals, above. If that fails, _settle restores the failures that it replaces.
        extent.in_flight.append(_Transfer(ticket, start, end, writes, failures))
        if failures:
            extent.failed = list(_without(extent.failed, start, end))
    return ticket.begin()


def _settle(extent: Extent) -> None:
    """Remove the transfers that have ended; keep the failures of writes."""
    in_flight, failed = extent.in_flight, extent.failed
    # The last transfer was refused, or interrupted before its submission.
    if in_flight and not in_flight[-1].ticket.has_begun:
        failed, in_flight = failed + in_flight[-1].replaces, in_flight[:-1]
    pending: list[_Transfer] = []
    for transfer in in_flight:
        if not transfer.ticket.done():
            pending.append(transfer)
        elif transfer.writes:
            try:
                transfer.ticket.wait()
            except SwapError as error:
                failed = [*failed, (transfer.start, transfer.end, error.again())]
    # In this order: after an interruption between the two, the same failures are found and stored once more.
    extent.failed = failed
    extent.in_flight = pending


def _without(ranges: list[_Failure], start: int, end: int) -> Iterator[_Failure]:
    """``ranges`` without [start, end)."""
    for first, last, error in ranges:
        if first < min(last, start):
            yield first, min(last, start), error
        if max(first, end) < last:
            yield max(first, end), last, error
