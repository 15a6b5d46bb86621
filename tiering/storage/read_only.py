"""Homes in the files of a user, which are read where they are and never written.

The bytes of frozen weights may be in a file already, exactly as compute needs them. Then their home is a list of ranges
of such files, beside homes that are extents of swap space: reads of both go through one I/O context, with the same
tickets, counters and errors. A home of files has no hazards, because nothing writes to it.

Note [A read lands shifted]
    With O_DIRECT, whole pages move between multiples of 4096 in the file and in memory. A tensor begins at any byte of
    its file, but in memory at a multiple of 256, because the results of kernels must not depend on where a parameter
    lives. So a read takes the pages around a range, and they land behind the place of their bytes. Once they have
    arrived, the bytes move to the left (``ReadLayout.arrange``), range after range: no move overwrites bytes that come
    later. This copies each byte once in host memory and needs no second buffer, only some pages behind the bytes. A
    copy to a device with its own memory takes the bytes from where they have landed.

The content of a file must not change while it is in use. ``check`` compares what the kernel records at each change.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from tiering.errors import SwapError, WeightsError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, round_up
from tiering.storage.descriptors import close_alone
from tiering.storage.file_system import FileVersion, open_for_reading
from tiering.storage.request import Buffer, FilePiece
from tiering.storage.tickets import Ticket

COPY_REMEDY = "set tiering.weights_in_place to false, so that the weights are copied to swap space at start"


@dataclass(frozen=True, slots=True)
class FileRange:
    """``nbytes`` from ``offset`` of ``file``, a part of the tensor ``name``. Their place in the home is ``at``."""

    name: str
    file: Path
    offset: int
    nbytes: int
    at: int

    @property
    def end(self) -> int:
        """The byte of the file behind the range."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class PageRead:
    """A read of the pages around ranges of ``file``, which land at ``at``. The last one ends with the file."""

    file: Path
    offset: int
    nbytes: int
    at: int


class Move(NamedTuple):
    """``nbytes`` move from ``source`` to ``target``; both count from the start of the memory of a read."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True)
class ReadLayout:
    """The reads that bring a home into memory, and the moves that arrange its bytes there. ``room`` is that memory."""

    reads: tuple[PageRead, ...]
    moves: tuple[Move, ...]
    room: int

    @classmethod
    def of(cls, ranges: Iterable[FileRange], sizes: Mapping[Path, int], nbytes: int) -> Self:
        """The layout for a home of ``nbytes`` with ``ranges``, in their order; ``sizes`` are those of the files."""
        reads: list[PageRead] = []
        moves: list[Move] = []
        room = 0
        for run in _adjacent(ranges):
            file, begin = run[0].file, run[0].offset // PAGE * PAGE
            length = min(round_up(run[-1].end), sizes[file]) - begin
            # Behind all bytes before, and so far to the right that none of these bytes has to move to the right.
            at = round_up(max(room, *(each.at - (each.offset - begin) for each in run)))
            reads.append(PageRead(file, begin, length, at))
            moves += [Move(at + each.offset - begin, each.at, each.nbytes) for each in run]
            room = at + round_up(length)
        return cls(tuple(reads), tuple(moves), max(room, nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes that the reads transfer."""
        return sum(read.nbytes for read in self.reads)

    def arrange(self, address: int) -> None:
        """Move the bytes to their places, in the memory at ``address``, once all reads have ended.

        Bytes between these places are undefined.
        """
        for source, target, nbytes in self.moves:
            if source != target:
                ctypes.memmove(address + target, address + source, nbytes)


def _adjacent(ranges: Iterable[FileRange]) -> Iterable[list[FileRange]]:
    """``ranges`` in runs that one read covers: each begins on the last page of the one before, or right behind it."""
    run: list[FileRange] = []
    for each in ranges:
        if run and (each.file != run[-1].file or not 0 <= each.offset - run[-1].end < PAGE):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def cut_ranges(ranges: Iterable[FileRange], start: int, end: int) -> tuple[FileRange, ...]:
    """The parts of ``ranges`` that are in bytes [start, end) of their home; their places count from ``start``."""
    parts = []
    for each in ranges:
        first, last = max(each.at, start), min(each.at + each.nbytes, end)
        if first < last:
            offset = each.offset + first - each.at
            parts.append(FileRange(each.name, each.file, offset, last - first, first - start))
    return tuple(parts)


@dataclass(eq=False)
class HomeInFiles:
    """A home of ``nbytes`` in ``ranges`` of files, which are in the order of the home. ``names`` are its tensors.

    A read of all of it needs ``slack`` more bytes of memory, or fewer: ranks that need different ones use one figure.
    """

    nbytes: int
    slack: int
    names: tuple[str, ...]
    ranges: tuple[FileRange, ...]
    sizes: Mapping[Path, int]
    in_flight: list[Ticket] = field(default_factory=list, repr=False)

    @cached_property
    def layout(self) -> ReadLayout:
        """The reads of the whole home."""
        return ReadLayout.of(self.ranges, self.sizes, self.nbytes)

    def cut(self, start: int, end: int) -> ReadLayout:
        """The reads of bytes [start, end) of the home."""
        return ReadLayout.of(cut_ranges(self.ranges, start, end), self.sizes, end - start)

    def part(self, start: int, end: int) -> HomeInFiles:
        """The home of bytes [start, end)."""
        ranges, nbytes = cut_ranges(self.ranges, start, end), end - start
        slack = ReadLayout.of(ranges, self.sizes, nbytes).room - nbytes
        return HomeInFiles(nbytes, slack, self.names, ranges, self.sizes)

    def place_of(self, offset: int) -> str:
        """The tensor at ``offset`` of the home and its file, for messages."""
        held = next(each for each in reversed(self.ranges) if each.at <= offset)
        return f"{held.name!r} in {held.file}"


class Loading:
    """Bytes of a home that are on their way into memory of their own."""

    def __init__(self, files: ReadOnlyFiles, layout: ReadLayout, nbytes: int) -> None:
        self._files = files
        self._layout = layout
        self._nbytes = nbytes
        self._memory = _Memory(layout.room)
        self._transfer: Ticket | None = None

    def begin(self, names: tuple[str, ...]) -> Self:
        """Start the reads."""
        self._transfer = self._files.begin(self._layout, self._memory, names, [])
        return self

    def wait(self) -> memoryview:
        """The bytes, once they are there. Bytes of the home that are in no range are zero.

        Raises SwapError if a read failed, WeightsError if a file has changed.
        """
        if self._transfer is not None:
            self._transfer.wait()
        self._files.check()
        self._layout.arrange(self._memory.address)
        content, end = memoryview(self._memory.mapping)[: self._nbytes], 0
        for _, target, nbytes in self._layout.moves:
            content[end:target] = bytes(target - end)
            end = target + nbytes
        content[end:] = bytes(self._nbytes - end)
        return content

    def settle(self) -> None:
        """Cancel the reads, and wait until none uses the memory. Their errors are ignored."""
        if self._transfer is not None:
            self._transfer.cancel()
            with contextlib.suppress(SwapError):
                self._transfer.wait()


class _Memory:
    """Pages of memory. They stay mapped as long as this object or a view of ``mapping`` lives."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(max(nbytes, 1))
        self.mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))


@dataclass(frozen=True, slots=True)
class _OpenFile:
    fd: int
    number: int
    status: tuple[int, ...]


class ReadOnlyFiles:
    """Files of a user that ``aio`` reads. Any thread may read; one thread opens and closes.

    ``versions`` are those of the files when their headers were read.
    """

    def __init__(self, versions: Mapping[Path, FileVersion], aio: AioContext) -> None:
        self._versions = versions
        self._sizes = {path: version.nbytes for path, version in versions.items()}
        self._aio = aio
        self._open: dict[Path, _OpenFile] = {}
        # Of the transfers in flight of each home.
        self._lock = threading.Lock()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The open files."""
        return tuple(self._open)

    @property
    def in_use(self) -> tuple[Path, ...]:
        """All files that this rank or another one may have open."""
        return tuple(self._versions)

    def home(
        self, ranges: Sequence[FileRange], nbytes: int, slack: int | None, names: tuple[str, ...]
    ) -> HomeInFiles:
        """A home of ``nbytes`` in ``ranges``, which are in the order of the home. Opens the files.

        Without a planned ``slack``, the home has what it needs.

        Raises WeightsError if a file cannot be opened, or is not the version whose header was read.
        """
        for file in dict.fromkeys(each.file for each in ranges):
            if file not in self._open:
                self._add(file)
        if slack is None:
            slack = ReadLayout.of(ranges, self._sizes, nbytes).room - nbytes
        home = HomeInFiles(nbytes, slack, names, tuple(ranges), self._sizes)
        assert home.layout.room <= nbytes + slack, "a read of a home needs more memory than its plan says"
        return home

    def read(self, home: HomeInFiles, buffer: Buffer, *, offset: int = 0, priority: int = 0) -> Ticket:
        """Start to read all of ``home``, from ``offset`` 0, into ``buffer``, of ``home.layout.room`` bytes.

        When the reads have ended, ``home.layout.arrange`` moves the bytes to their places. As with an extent of swap
        space, ``settle`` after an exception before the memory is released.
        """
        if buffer.nbytes < home.layout.room:
            raise ValueError(
                f"a read of {home.names[:1]} needs {home.layout.room} bytes, not {buffer.nbytes}"
            )
        assert not offset, "a home in files is read as a whole"
        with self._lock:
            # One that was interrupted before its submission is never done, and would keep its buffer.
            home.in_flight[:] = [each for each in home.in_flight if each.has_begun and not each.done()]
            return self.begin(home.layout, buffer, home.names, home.in_flight, priority)

    def load(self, home: HomeInFiles, offset: int, nbytes: int) -> Loading:
        """Start to read bytes [offset, offset + nbytes) of ``home`` into memory of their own."""
        return Loading(self, home.cut(offset, offset + nbytes), nbytes).begin(home.names)

    def begin(
        self,
        layout: ReadLayout,
        buffer: Buffer,
        names: tuple[str, ...],
        in_flight: list[Ticket],
        priority: int = 0,
    ) -> Ticket:
        """Start the reads of ``layout`` into ``buffer``, as one transfer that is added to ``in_flight``."""
        pieces = [
            FilePiece(self._open[read.file].number, read.at, read.offset, read.nbytes)
            for read in layout.reads
        ]
        ticket = self._aio.prepare_vector("read", buffer, pieces, priority=priority, names=names)
        if not pieces:  # a rank whose shard is padding
            return ticket
        # First: whatever an exception interrupts, ``settle`` finds the transfer if it has begun.
        in_flight.append(ticket)
        try:
            return ticket.begin()
        except BaseException:
            _settle([ticket])
            raise

    def settle(self, home: HomeInFiles) -> None:
        """Wait for all reads of ``home`` by ``read``. Errors of reads are ignored."""
        _settle(tuple(home.in_flight))

    def check(self) -> None:
        """Raise WeightsError if a file has changed since it was opened: its size, or the time of a change."""
        for path, file in self._open.items():
            status = _status(file.fd)
            if status != file.status:
                raise _changed(path, file.status, status)

    def close(self) -> None:
        """Close the files. The I/O context must have been closed first."""
        while self._open:
            close_alone(self._open.popitem()[1].fd)

    def _add(self, path: Path) -> None:
        fd, direct = open_for_reading(path)
        try:
            if FileVersion.of(fd) != self._versions[path]:
                raise WeightsError(
                    f"{path}: it has changed since its header was read",
                    "start again when no process writes to it",
                )
            file = _OpenFile(fd, self._aio.add_file(fd, direct=direct, name=str(path)), _status(fd))
        except BaseException:
            close_alone(fd)
            raise
        # Not in the block above: an interruption behind it would close the descriptor twice.
        self._open[path] = file


def _settle(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        if ticket.has_begun:
            with contextlib.suppress(SwapError):
                ticket.wait()


def _status(fd: int) -> tuple[int, ...]:
    """What the kernel records at each change of a file; no program can set the last one."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(path: Path, before: tuple[int, ...], now: tuple[int, ...]) -> WeightsError:
    what = "another process has written to it, or changed its mode or name"
    if before[2] != now[2]:
        what = f"it had {before[2]} bytes and has {now[2]}"
    return WeightsError(
        f"{path}: it has changed while this run reads frozen weights from it: {what}",
        f"no pass can be trusted since then. Load the last checkpoint in a new run, and leave the file alone; or"
        f" {COPY_REMEDY}",
    )
