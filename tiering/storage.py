"""Swap space: one anonymous, preallocated file per rank and directory, cut into extents.

The file is made with ``O_TMPFILE``: it has no name, so two jobs in one directory cannot meet, and the kernel frees it
when the last descriptor closes, also after ``kill -9``. Its blocks are reserved by ``fallocate(2)`` before the first
step, so a full disk is found at start and not in the middle of a run. Forked children close their copy of the
descriptor at once, or a data worker would keep the space alive.

**Ordering.** ``O_DIRECT`` orders nothing: of a write and a read of the same bytes that are in flight together, either
may come first. Each extent therefore remembers its transfers in flight, and a new one that conflicts (they overlap and
one of them writes) is submitted to run *after* the earlier ones. A failed write marks its extent: until the range is
written anew, reading it raises the write's error instead of returning stale bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tiering.aio import AioContext, Buffer, Ticket
from tiering.arena import round_up
from tiering.errors import SwapError, SwapSpaceError
from tiering.ranges import FreeRanges

log = logging.getLogger(__name__)

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OPEN_SLABS: weakref.WeakSet[SlabFile] = weakref.WeakSet()


@dataclass(frozen=True)
class _Transfer:
    ticket: Ticket
    start: int
    end: int
    writes: bool

    def conflicts(self, start: int, end: int, writes: bool) -> bool:
        return self.start < end and start < self.end and (writes or self.writes)


@dataclass(eq=False)
class Extent:
    """A range of a slab file: ``nbytes`` at ``offset``, both multiples of 4096. ``names`` say what lives there."""

    offset: int
    nbytes: int
    names: tuple[str, ...]
    in_flight: list[_Transfer] = field(default_factory=list, repr=False)
    failed: list[tuple[int, int, SwapError]] = field(default_factory=list, repr=False)


class SlabFile:
    """``nbytes`` of swap space in ``directory``, served through ``aio``.

    Raises SwapSpaceError when the directory is missing, not writable, held in memory (tmpfs) or too full.
    Thread-safe.
    """

    def __init__(
        self, directory: Path, nbytes: int, aio: AioContext, *, allow_memory_file_system: bool = False
    ) -> None:
        self.directory = check_directory(directory, allow_memory_file_system=allow_memory_file_system)
        self.capacity = round_up(nbytes)
        self.aio = aio
        self._lock = threading.Lock()
        self.fd, self.direct = _open_anonymous(self.directory)
        try:
            _reserve(self.fd, self.capacity, self.directory)
            self._file = aio.add_file(self.fd, direct=self.direct, name=str(self.directory))
        except BaseException:
            os.close(self.fd)
            raise
        self._free = FreeRanges(self.capacity)
        self.used = 0
        _OPEN_SLABS.add(self)

    def allocate(self, nbytes: int, names: tuple[str, ...]) -> Extent:
        """An extent of ``nbytes`` rounded up to 4096, first fit. Raises SwapSpaceError when none is left."""
        size = round_up(nbytes)
        with self._lock:
            start = self._free.take(size)
            if start is not None:
                self.used += size
                return Extent(start, size, names)
        raise SwapSpaceError(
            f"swap file in {self.directory}: no extent of {size} bytes left for {_shorten(names)}"
            f" ({self.used} of {self.capacity} bytes used); raise nvme_budget"
        )

    def free(self, extent: Extent) -> None:
        """Give an extent back; its transfers in flight are waited for, and what failed no longer matters."""
        for transfer in tuple(extent.in_flight):
            with contextlib.suppress(SwapError):
                transfer.ticket.wait()
        with self._lock:
            self._free.give(extent.offset, extent.nbytes)
            self.used -= extent.nbytes

    def swap_in(
        self, extent: Extent, buffer: Buffer, *, offset: int = 0, nbytes: int | None = None, priority: int = 0
    ) -> Ticket:
        """Start reading ``nbytes`` (default: the buffer's) at ``offset`` of ``extent`` into ``buffer``."""
        return self._start(extent, buffer, offset, nbytes, priority, writes=False)

    def swap_out(
        self, extent: Extent, buffer: Buffer, *, offset: int = 0, nbytes: int | None = None, priority: int = 0
    ) -> Ticket:
        """Start writing ``nbytes`` (default: the buffer's) from ``buffer`` at ``offset`` of ``extent``."""
        return self._start(extent, buffer, offset, nbytes, priority, writes=True)

    def close(self) -> None:
        """Close the descriptor; the kernel frees the space. The I/O context must have been closed first."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _start(
        self, extent: Extent, buffer: Buffer, offset: int, nbytes: int | None, priority: int, *, writes: bool
    ) -> Ticket:
        length = min(buffer.nbytes, extent.nbytes - offset) if nbytes is None else nbytes
        if offset < 0 or length <= 0 or offset + length > extent.nbytes or length > buffer.nbytes:
            raise ValueError(
                f"transfer [{offset}, {offset + length}) does not fit an extent of {extent.nbytes} bytes and a"
                f" buffer of {buffer.nbytes} bytes ({_shorten(extent.names)})"
            )
        submit = self.aio.write if writes else self.aio.read
        end = offset + length
        with self._lock:
            self._settle(extent)
            for start, stop, error in extent.failed:
                if not writes and start < end and offset < stop:
                    raise error
            ticket = submit(
                self._file,
                buffer,
                extent.offset + offset,
                length,
                priority=priority,
                after=[t.ticket for t in extent.in_flight if t.conflicts(offset, end, writes)],
                names=extent.names,
            )
            if writes:  # only now: a write that is refused replaces nothing
                extent.failed = list(_without(extent.failed, offset, end))
            extent.in_flight.append(_Transfer(ticket, offset, end, writes))
            return ticket

    def _settle(self, extent: Extent) -> None:
        """Forget the transfers that have ended; remember the writes that failed."""
        still: list[_Transfer] = []
        for transfer in extent.in_flight:
            if not transfer.ticket.done():
                still.append(transfer)
            elif transfer.writes:
                try:
                    transfer.ticket.wait()
                except SwapError as error:
                    extent.failed.append((transfer.start, transfer.end, error))
        extent.in_flight = still


def check_directory(directory: Path, *, allow_memory_file_system: bool = False) -> Path:
    """``directory`` itself if swap space can be made in it, else SwapSpaceError with the reason and the remedy."""
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        raise SwapSpaceError(
            f"nvme_path {directory} does not exist; create it (mkdir -p {directory}) or name another"
        ) from None
    except OSError as error:
        raise SwapSpaceError(
            f"nvme_path {directory} cannot be reached: {error.strerror}; change the mode of the directories above it"
            " or name another"
        ) from error
    if not stat.S_ISDIR(mode):
        raise SwapSpaceError(f"nvme_path {directory} is not a directory; name one")
    kind = _file_system_type(directory)
    if kind in _MEMORY_FILE_SYSTEMS and not allow_memory_file_system:
        raise SwapSpaceError(
            f"nvme_path {directory} is on {kind}, which lives in RAM: state swapped there would use the memory it is"
            f" meant to save; name a directory on a disk"
        )
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        raise SwapSpaceError(
            f"nvme_path {directory} is on a file system that is mounted read-only; remount it or name another directory"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SwapSpaceError(
            f"nvme_path {directory} is not writable by this user; change its mode or name another"
        )
    return directory


def free_bytes(directory: Path) -> int:
    """Bytes that an unprivileged user may still write in ``directory``'s file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _open_anonymous(directory: Path) -> tuple[int, bool]:
    """A nameless file in ``directory``: (descriptor, whether O_DIRECT is in use)."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        try:
            return os.open(directory, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        fd = os.open(directory, flags, 0o600)
    except OSError as error:
        remedy = {
            errno.EROFS: " (the file system is mounted read-only); remount it or name another directory",
            errno.EOPNOTSUPP: " (its file system has no O_TMPFILE); name a directory on ext4, xfs or btrfs",
            errno.EISDIR: " (its file system has no O_TMPFILE); name a directory on ext4, xfs or btrfs",
        }.get(error.errno or 0, "; check its mode and owner")
        raise SwapSpaceError(f"cannot create a swap file in {directory}: {error.strerror}{remedy}") from error
    log.warning(
        "%s refuses O_DIRECT: swapping through the page cache, which uses memory beyond the budgets",
        directory,
    )
    return fd, False


def _reserve(fd: int, nbytes: int, directory: Path) -> None:
    """Allocate blocks with the system call itself: glibc's posix_fallocate would fall back to writing zeros."""
    available = free_bytes(directory)
    if nbytes > available:
        raise SwapSpaceError(
            f"the swap file needs {nbytes} bytes but {directory} has {available} free; free"
            f" {nbytes - available} bytes, name another nvme_path, or raise host_budget so that less is swapped"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if nbytes and libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code == errno.EOPNOTSUPP:
            log.warning(
                "%s cannot reserve space (no fallocate): a full disk will show only when written", directory
            )
            os.ftruncate(fd, nbytes)
            return
        raise SwapSpaceError(
            f"cannot reserve {nbytes} bytes in {directory}: {os.strerror(code)}; check the free space, quota and file"
            " size limit there (ulimit -f), or name another nvme_path"
        )


def _file_system_type(directory: Path) -> str:
    """The type in /proc/self/mountinfo of the mount that holds ``directory``, or "unknown"."""
    device = directory.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted and after:
            return after.split()[0]
    return "unknown"


def _without(
    ranges: list[tuple[int, int, SwapError]], start: int, end: int
) -> Iterator[tuple[int, int, SwapError]]:
    """``ranges`` less [start, end)."""
    for first, last, error in ranges:
        if first < min(last, start):
            yield first, min(last, start), error
        if max(first, end) < last:
            yield max(first, end), last, error


def _shorten(names: tuple[str, ...], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _close_in_child() -> None:
    for slab in list(_OPEN_SLABS):
        slab.close()


os.register_at_fork(after_in_child=_close_in_child)
