"""Reads ranges of stored tensors through the I/O engine, with read-ahead, in bounded memory.

Ranges are read into a few windows. A sequential reader finds its next window already in flight; at the end of a tensor,
this is the start of the next tensor in the given order, so the disk is never idle between tensors. For a random access,
only the requested range is read, because read-ahead would rarely help. Reads bypass the page cache if the file system
allows it: caching files that are read once would take memory from the tiers. Of files with checksums, whole pages are
read and verified before the caller sees them.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from optim_cpu import kernels
from tiering._text import shorten
from tiering.config.training import IoConfig
from tiering.errors import SwapError, WeightsError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.descriptors import close_alone
from tiering.storage.file_system import open_for_reading
from tiering.storage.io_stats import errno_text
from tiering.storage.tickets import Ticket
from tiering.weights.files import StoredTensor, Sums, WeightFiles, damaged

# One window is in use by the caller, two are being read.
WINDOWS = 3
WINDOW_BYTES = 4 << 20

_Place = tuple[StoredTensor, int]
"""A tensor and a byte offset in it."""

Request = StoredTensor | tuple[StoredTensor, int, int]
"""An expected read: a tensor, or its elements [first, end)."""


class _Window:
    """A piece of memory, and the range of a tensor's bytes that is being read into it or is there."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._ticket: Ticket | None = None
        # Bytes from the start of the page to the start of the range.
        self._skipped = 0
        # Checksums to verify after the read; None if there are none, or after verification.
        self._sums: Sums | None = None
        # Offset and bytes of the read in the file.
        self._at = self._nbytes = 0
        self.tensor: StoredTensor
        self.start = self.end = 0

    def fill(
        self,
        aio: AioContext,
        file: int,
        tensor: StoredTensor,
        start: int,
        end: int,
        sums: Sums | None,
        size: int,
    ) -> None:
        """Starts to read bytes [start, end) after the previous read has ended; with ``sums``, whole pages."""
        self.settle()
        self.tensor, self.start, self.end = tensor, start, end
        self._skipped = (tensor.offset + start) % PAGE
        self._sums = sums
        self._at = tensor.offset + start - self._skipped
        stop = tensor.offset + end if sums is None else min(round_up(tensor.offset + end), size)
        self._nbytes = stop - self._at
        # Store the ticket before the read begins: if an exception follows, ``settle`` still waits for it.
        self._ticket = aio.prepare("read", file, self._lease, self._at, self._nbytes, names=(tensor.name,))
        self._ticket.begin()

    def wait(self) -> None:
        """Waits for the read. Raises SwapError if it failed, WeightsError if a checksum differs."""
        if self._ticket is not None:
            self._ticket.wait()
            if self._sums is not None:
                self._compare(self._sums)
                self._sums = None

    def _compare(self, sums: Sums) -> None:
        pages = round_up(self._nbytes) // PAGE
        self._lease.view[self._nbytes : pages * PAGE] = bytes(pages * PAGE - self._nbytes)
        bad = sums.first_difference(self._lease.address, self._at // PAGE, pages)
        if bad is not None:
            raise damaged(
                self.tensor.file,
                f"{self.tensor.name!r} is damaged: CRC32C mismatch in bytes {bad * PAGE} to {(bad + 1) * PAGE}",
                "the disk or the memory is bad: see dmesg",
            )

    def drop(self) -> None:
        """Cancels the read, whose data is not needed any more."""
        if self._ticket is not None and self._ticket.has_begun:
            self._ticket.cancel()

    def settle(self) -> None:
        """Waits until no transfer uses the memory, and ignores errors of the transfer."""
        if self._ticket is not None and self._ticket.has_begun:
            with contextlib.suppress(SwapError):
                self._ticket.wait()
        self._ticket = None

    def holds(self, tensor: StoredTensor, at: int) -> bool:
        return self.tensor == tensor and self.start <= at < self.end

    def view(self, start: int, end: int) -> memoryview:
        shift = self._skipped - self.start
        return self._lease.view[shift + start : shift + end]


class WeightReader:
    """Reads the tensors of ``files``; ``order`` is their expected order. Not thread-safe.

    Raises WeightsError if a file cannot be read, or has changed since its header was read.
    """

    def __init__(self, files: WeightFiles, io: IoConfig, order: Iterable[Request] = ()) -> None:
        # A range may start in the middle of a page.
        room = WINDOW_BYTES + PAGE
        if files.sums:
            # It may also end in the middle of a page, of which all bytes are read.
            room += PAGE
        arena = Arena.map(WINDOWS * room, "weights")
        self._windows_nbytes = arena.nbytes
        self._files = files
        # Halves of one tensor are read alternately.
        expected = [_in_bytes(part) for part in order if _tensor_of(part).halves is None]
        expected = [(tensor, start, end) for tensor, start, end in expected if start < end]
        self._ends = {tensor: end for tensor, _, end in expected}
        self._next = {
            tensor: (successor, start) for (tensor, _, _), (successor, start, _) in pairwise(expected)
        }
        self._continues: _Place | None = expected[0][:2] if expected else None
        self._aio = AioContext(
            engine=io.engine,
            block_size=io.block_size,
            queue_depth=io.queue_depth,
            registered=io.registered,
        )
        self._aio.register(arena)
        # The descriptor of each open file, and its number in the I/O context.
        self._open: dict[Path, tuple[int, int]] = {}
        self._joined = bytearray()
        self._idle = deque(_Window(arena.lease(room, "window")) for _ in range(WINDOWS))
        # Windows of consecutive ranges; the first one is in use by the caller.
        self._filling: deque[_Window] = deque()

    def open_files(self, paths: Iterable[Path]) -> None:
        """Opens the files now, so that they can be read even if they are removed later."""
        for path in paths:
            self._file(path)

    def read(self, tensor: StoredTensor, first: int, numel: int) -> memoryview:
        """The bytes of elements [first, first + numel) of ``tensor``, valid until the next call.

        Their address is a multiple of the element's size. A range in several windows is copied to one buffer.
        """
        start, end = first * tensor.itemsize, (first + numel) * tensor.itemsize
        if first < 0 or numel < 0 or end > tensor.nbytes:
            raise ValueError(f"{tensor.name!r} has {tensor.numel} elements, not [{first}, {first + numel})")
        if numel == 0:
            return memoryview(b"")
        if tensor.halves is not None:
            return self._read_halves(*tensor.halves, first, numel)
        sequential = self._continues == (tensor, start)
        self._continues = self._after(tensor, end)
        window = self._window(tensor, start, end, sequential)
        if end <= window.end and (tensor.offset + start) % tensor.itemsize == 0:
            return window.view(start, end)
        if len(self._joined) < end - start:
            self._joined = bytearray(end - start)
        joined = memoryview(self._joined)[: end - start]
        at = start
        while True:
            stop = min(end, window.end)
            joined[at - start : stop - start] = window.view(at, stop)
            if stop == end:
                return joined
            at = stop
            window = self._window(tensor, at, end, sequential)

    def _read_halves(self, upper: StoredTensor, lower: StoredTensor, first: int, numel: int) -> memoryview:
        # A copy: the read of the lower halves may use the same windows.
        high = np.frombuffer(self.read(upper, first, numel), dtype=np.uint16).copy()
        low = np.frombuffer(self.read(lower, first, numel), dtype=np.uint16)
        joined = np.empty(numel, dtype=np.float32)
        kernels.join(joined.ctypes.data, high.ctypes.data, low.ctypes.data, numel)
        return joined.view(np.uint8).data

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use: 12 MiB, plus the longest range that was copied from several windows."""
        return self._windows_nbytes + len(self._joined)

    def close(self) -> None:
        """Ends the transfers in flight and closes the files. A second call does nothing."""
        self._drop_until(None)
        for window in self._idle:
            window.settle()
        self._aio.close()
        while self._open:
            close_alone(self._open.popitem()[1][0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _window(self, tensor: StoredTensor, at: int, end: int, sequential: bool) -> _Window:
        """The filled window with byte ``at``. Starts to read the next windows, up to ``end`` or beyond."""
        try:
            self._drop_until((tensor, at))
            self._read_ahead((tensor, at), end, sequential)
            window = self._filling[0]
            window.wait()
        except SwapError as error:
            self._drop_until(None)
            raise _read_error(error) from error
        self._check_version(tensor.file, self._open[tensor.file][0])
        return window

    def _read_ahead(self, place: _Place | None, end: int, sequential: bool) -> None:
        """Starts to fill idle windows, from the end of the last window or from ``place``."""
        tensor_in_use = place[0] if place else None
        if self._filling:
            place = self._after(self._filling[-1].tensor, self._filling[-1].end)
        while self._idle and place is not None:
            tensor, start = place
            limit = end if tensor == tensor_in_use else 0
            if sequential:
                limit = max(limit, self._end_of(tensor))
            if start >= limit:
                return
            stop = min(start + WINDOW_BYTES, limit)
            self._submit(tensor, start, stop)
            place = self._after(tensor, stop)

    def _after(self, tensor: StoredTensor, end: int) -> _Place | None:
        """The expected place after byte ``end`` of ``tensor``."""
        return (tensor, end) if end < self._end_of(tensor) else self._next.get(tensor)

    def _end_of(self, tensor: StoredTensor) -> int:
        """The byte up to which ``tensor`` will be read."""
        return self._ends.get(tensor, tensor.nbytes)

    def _submit(self, tensor: StoredTensor, start: int, stop: int) -> None:
        number, sums = self._file(tensor.file), self._files.sums.get(tensor.file)
        size = self._files.versions[tensor.file].nbytes
        # Remove the window from the idle ones only after `fill`, so that an exception does not lose it.
        window = self._idle[0]
        window.fill(self._aio, number, tensor, start, stop, sums, size)
        self._filling.append(window)
        self._idle.popleft()

    def _drop_until(self, place: _Place | None) -> None:
        """Releases the windows before the one with ``place``, or all."""
        while self._filling and (place is None or not self._filling[0].holds(*place)):
            window = self._filling.popleft()
            window.drop()
            self._idle.append(window)

    def _file(self, path: Path) -> int:
        """The number of a file in the I/O context; opens it at the first call."""
        if path not in self._open:
            fd, direct = open_for_reading(path)
            try:
                self._check_version(path, fd)
                number = self._aio.add_file(fd, direct=direct, name=str(path))
            except BaseException:
                close_alone(fd)
                raise
            # Not in the block above: an interruption behind it would close the descriptor twice.
            self._open[path] = fd, number
        return self._open[path][1]

    def _check_version(self, path: Path, fd: int) -> None:
        if not self._files.versions[path].is_of(fd):
            raise damaged(
                path, "it has changed since its header was read", "load it when no process writes to it"
            )


def _tensor_of(request: Request) -> StoredTensor:
    return request if isinstance(request, StoredTensor) else request[0]


def _in_bytes(request: Request) -> tuple[StoredTensor, int, int]:
    tensor, first, end = (request, 0, request.numel) if isinstance(request, StoredTensor) else request
    return tensor, first * tensor.itemsize, end * tensor.itemsize


def _read_error(error: SwapError) -> WeightsError:
    code = error.errno or errno.EIO
    remedy = "see dmesg"
    if code == errno.ENODATA:
        remedy = "it was truncated, or the disk is bad: see dmesg, and download it again"
    problem = f"reading {shorten(error.names)} at byte {error.offset} failed: {errno_text(code)}"
    return damaged(Path(error.filename), problem, remedy)
