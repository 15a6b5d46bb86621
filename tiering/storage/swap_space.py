"""Swap space: all the slabs of a rank, one per path, and the extents that lie on several of them.

Each kind of state has its own paths (a *section*). The size of a section is divided over its paths in proportion to
their measured bandwidth, as far as they have room (see striping.py); a slab is as large as the sum of its parts. All
transfers use one I/O context, which has a queue for each path, so a slow path delays only transfers of its own bytes.
New extents use less of a path that becomes slow (path_speeds.py); existing extents keep their places.

A transfer over several paths is one request (``AioContext.prepare_vector``): it is submitted as a whole or not at all,
and the memory is free when all its pieces are done. An extent keeps its transfers in order (transfer_order.py).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiering import _logs
from tiering._text import shorten
from tiering.config.training import format_size
from tiering.errors import SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, round_up
from tiering.storage.bandwidth import max_bytes, measure, weights
from tiering.storage.io_stats import FileStats
from tiering.storage.path_speeds import PathSpeeds
from tiering.storage.request import Buffer, FilePiece
from tiering.storage.slab_file import Extent, SlabFile
from tiering.storage.striping import Need, StripeMap, apportion, shares_of
from tiering.storage.swap_file import check_directory, disk_of, free_by_file_system, too_full, wait_for_space
from tiering.storage.tasks import Task
from tiering.storage.tickets import Ticket
from tiering.storage.transfer_order import OrderedTransfer, TransferOrder

log = logging.getLogger(__name__)

MOST_RANGES = 64
"""Ranges of an extent whose pieces are kept."""


@dataclass(frozen=True)
class Section:
    """The swap space of one kind of state: ``nbytes``, a multiple of 4096, over ``paths``."""

    nbytes: int
    paths: tuple[Path, ...]


@dataclass(frozen=True)
class ExtentPart:
    """The part of an extent on one path."""

    slab: SlabFile
    extent: Extent


@dataclass(frozen=True, eq=False)
class StripedExtent:
    """``nbytes`` of swap space, a multiple of 4096. ``names`` are the tensors in it."""

    nbytes: int
    names: tuple[str, ...]
    section: str
    parts: tuple[ExtentPart, ...]
    stripes: StripeMap
    order: TransferOrder = field(default_factory=TransferOrder, repr=False)
    _pieces: dict[tuple[int, int], tuple[FilePiece, ...]] = field(default_factory=dict, repr=False)

    def pieces(self, offset: int, nbytes: int) -> tuple[FilePiece, ...]:
        """The pieces of a transfer of [offset, offset + nbytes)."""
        # Every step moves the same ranges.
        known = self._pieces.get((offset, nbytes))
        if known is None:
            if len(self._pieces) >= MOST_RANGES:
                self._pieces.clear()
            known = self._pieces[offset, nbytes] = tuple(self._cut(offset, nbytes))
        return known

    def _cut(self, offset: int, nbytes: int) -> Iterator[FilePiece]:
        for piece in self.stripes.pieces(offset, nbytes):
            slab, extent = self.parts[piece.path].slab, self.parts[piece.path].extent
            yield FilePiece(slab.file, piece.start - offset, extent.offset + piece.offset, piece.nbytes)

    def place_of(self, offset: int) -> str:
        """The place on disk of the byte at ``offset``, for messages."""
        (piece,) = self.stripes.pieces(offset, 1)
        part = self.parts[piece.path]
        return f"byte {part.extent.offset + piece.offset} of the swap file in {part.slab.directory}"


class SwapSpace:
    """Swap space for ``sections``, reserved. Thread-safe.

    ``weights`` are bytes per second of each measured path; the paths of a section with several paths are measured.
    Raises SwapSpaceError when a directory cannot hold swap space or the sections do not fit, with the numbers.
    """

    def __init__(
        self, sections: Mapping[str, Section], aio: AioContext, *, allow_memory_file_system: bool = False
    ) -> None:
        self.directories = _directories(sections, allow_memory_file_system)
        self.weights: dict[Path, int] = {}
        self._aio = aio
        self._lock = threading.Lock()
        # Held while transfers are ordered and submitted, so that all paths have writes of one range in the same order;
        # a run of tasks holds it as a whole. Always entered directly, as a C function.
        self.ordering = threading.RLock()
        self._allow = allow_memory_file_system
        self.slabs: tuple[SlabFile, ...] = ()
        number = {directory: index for index, directory in enumerate(self.directories)}
        needs = {
            name: Need(section.nbytes, tuple(number[path.resolve()] for path in section.paths))
            for name, section in sections.items()
        }
        try:
            planned = self._make_slabs(needs)
        except BaseException:
            self.close()
            raise
        self.speeds = PathSpeeds.measured({str(path): rate for path, rate in self.weights.items()})
        self._planned = {
            name: [by_path.get(index, 0) for index in range(len(self.slabs))]
            for name, by_path in zip(needs, planned, strict=True)
        }
        self._remaining = {name: list(nbytes) for name, nbytes in self._planned.items()}

    def allocate(self, nbytes: int, names: tuple[str, ...], section: str) -> StripedExtent:
        """An extent of ``nbytes`` rounded up to 4096 on the paths of ``section``; SwapSpaceError when none is left."""
        if nbytes <= 0:
            raise ValueError(f"an extent has at least one byte, not {nbytes} ({shorten(names)})")
        size = round_up(nbytes)
        # One lock for the division and for the extents, so that two threads do not count on the same room.
        with self._lock:
            remaining = self._remaining[section]
            # After extents were freed, the free space of a path may be fragmented.
            room = [
                min(path_remaining, slab.largest)
                for path_remaining, slab in zip(remaining, self.slabs, strict=True)
            ]
            planned = self._planned[section]
            shares = shares_of(size, self._slowed(room), planned) or shares_of(size, room, planned)
            if shares is None:
                directories = ", ".join(
                    str(slab.directory)
                    for slab, planned in zip(self.slabs, self._planned[section], strict=True)
                    if planned
                )
                raise SwapSpaceError(
                    f"swap space for {section} in {directories}: no extent of {size} bytes left for {shorten(names)}"
                    f" ({sum(remaining)} of {sum(self._planned[section])} bytes left); raise nvme_budget"
                )
            parts = []
            for index, (slab, share) in enumerate(zip(self.slabs, shares, strict=True)):
                remaining[index] -= share
                if share:
                    parts.append(ExtentPart(slab, slab.allocate(share, names)))
        return StripedExtent(
            size, names, section, tuple(parts), StripeMap([part.extent.nbytes for part in parts])
        )

    def grow(self, section: str, nbytes: int) -> None:
        """Reserve at least ``nbytes`` more for ``section``, divided over its paths like its first bytes.

        Slow paths get less. Raises SwapSpaceError when there is too little space; what other paths have reserved by
        then is kept.
        """
        with self._lock:
            planned = self._planned[section]
            parts = self._slowed(planned)
            # A few pages, on slow paths only, have no part that is a page.
            parts = parts if any(parts) else list(planned)
            total = sum(parts)
            for index, (slab, share) in enumerate(zip(self.slabs, parts, strict=True)):
                more = round_up(-(-nbytes * share // total))
                if more:
                    slab.grow(more)
                    planned[index] += more
                    self._remaining[section][index] += more

    def observe(self, stats: Iterable[FileStats]) -> None:
        """Compare the speeds of the paths with the measured ones, from the counters of the I/O context's files.

        Called after each step. A path that becomes slow gets less of new extents, until it is fast again.
        """
        for name in self.speeds.observe(stats):
            path = self.speeds.paths[name]
            figures = (
                f"{format_size(round(path.recent or 0))}/s, {format_size(path.measured)}/s were measured"
            )
            if path.is_slow:
                log.warning(
                    "nvme_path %s has become slow (%s): each transfer waits for its part there. New extents use less of"
                    " this path; existing extents keep their places until a restart. Check what else uses the drive,"
                    " and its health",
                    name,
                    figures,
                )
            else:
                log.info("nvme_path %s is as fast as the other paths again (%s)", name, figures)

    def _slowed(self, nbytes: Sequence[int]) -> list[int]:
        """Bytes per path, less on those that are slow; multiples of 4096 stay such."""
        return [
            int(each * self.speeds.share(str(slab.directory))) // PAGE * PAGE
            for each, slab in zip(nbytes, self.slabs, strict=True)
        ]

    def free(self, extent: StripedExtent) -> None:
        """Free an extent, after its transfers in flight; their failures are dropped."""
        # First: a transfer that is still in flight would conflict with transfers of the next owner of the range.
        self.settle(extent)
        for part in extent.parts:
            # Read first: ``SlabFile.free`` sets it to zero.
            nbytes = part.extent.nbytes
            part.slab.free(part.extent)
            with self._lock:
                self._remaining[extent.section][self.slabs.index(part.slab)] += nbytes

    def swap_in(
        self,
        extent: StripedExtent,
        buffer: Buffer,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Start reading ``nbytes`` (default: the buffer's) at ``offset`` of ``extent`` into ``buffer``.

        A signal handler may raise before the caller has the ticket: after an exception, ``settle`` the extent before
        the memory is released.
        """
        with self.ordering:
            return self.ordered(extent, buffer, offset, nbytes, priority, writes=False).begin()

    def swap_out(
        self,
        extent: StripedExtent,
        buffer: Buffer,
        *,
        offset: int = 0,
        nbytes: int | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Start writing ``nbytes`` (default: the buffer's) from ``buffer`` at ``offset`` of ``extent``.

        After an exception, ``settle`` as with ``swap_in``.
        """
        with self.ordering:
            return self.ordered(extent, buffer, offset, nbytes, priority, writes=True).begin()

    def settle(self, extent: StripedExtent) -> None:
        """Wait for all transfers of ``extent``. A failed write is raised by the next read of its range."""
        extent.order.settle()

    @property
    def used(self) -> int:
        """Bytes in extents."""
        return sum(slab.used for slab in self.slabs)

    @property
    def capacity(self) -> int:
        """Bytes reserved."""
        return sum(slab.capacity for slab in self.slabs)

    def close(self) -> None:
        """Close the files; the kernel frees the space. The I/O context must have been closed first."""
        # Not before the I/O context is closed: its driver uses the descriptors.
        for slab in self.slabs:
            slab.close()

    def ordered(
        self,
        extent: StripedExtent,
        buffer: Buffer,
        offset: int,
        nbytes: int | None,
        priority: int = 0,
        first: Sequence[Ticket] = (),
        *,
        writes: bool,
    ) -> OrderedTransfer:
        """A transfer that is not submitted, after all that conflict with it and after ``first``; else as ``swap_in``.

        The caller holds ``ordering`` until it is submitted.
        """
        # A freed extent has none: its range may have a new owner.
        size = extent.nbytes if extent.parts[0].extent.nbytes else 0
        length = min(buffer.nbytes, size - offset) if nbytes is None else nbytes
        if offset < 0 or length <= 0 or offset + length > size or length > buffer.nbytes:
            raise ValueError(
                f"transfer [{offset}, {offset + length}) does not fit an extent of {size} bytes and a"
                f" buffer of {buffer.nbytes} bytes ({shorten(extent.names)})"
            )
        pieces = extent.pieces(offset, length)
        return extent.order.ordered(
            offset,
            offset + length,
            writes,
            lambda after: self._aio.prepare_vector(
                "write" if writes else "read",
                buffer,
                pieces,
                priority=priority,
                after=(*first, *after),
                names=extent.names,
            ),
        )

    def run(self, tasks: Sequence[Task], transfers: Sequence[OrderedTransfer]) -> None:
        """Run ``tasks``, which begin these ``transfers``; see ``AioContext.run``. The caller holds ``ordering``."""
        # All before the first is submitted: whatever interrupts the run, ``settle`` finds those that have begun.
        for transfer in transfers:
            transfer.store()
        self._aio.run(tasks)

    def _make_slabs(self, needs: Mapping[str, Need]) -> list[dict[int, int]]:
        """Open the slabs, measure those that share a section, resize each. Returns bytes per need and path."""
        disks = [directory.stat().st_dev for directory in self.directories]
        wait_for_space(
            self.directories,
            lambda: (
                apportion(
                    list(needs.values()), [1] * len(disks), disks, free_by_file_system(self.directories)
                )
                is not None
            ),
        )
        room = free_by_file_system(self.directories)
        striped = sorted({path for need in needs.values() if len(need.paths) > 1 for path in need.paths})
        even = self._apportion(needs, [1] * len(disks), disks, room)
        if not striped:
            for index, size in enumerate(_totals(even, len(disks))):
                self._open(index, size)
            return even
        self._warn_of_shared_disks(needs)
        # Reserve only the bytes to measure; the final sizes depend on the result.
        for index, size in enumerate(_totals(even, len(disks))):
            self._open(index, min(size, max_bytes(self._aio)) if index in striped else size)
        rates = [1] * len(disks)
        measured = [index for index in striped if self.slabs[index].capacity]
        if len(measured) > 1:
            measured_rates = weights(
                # Before the first extent: this overwrites the files.
                measure(self._aio, [(self.slabs[i].file, self.slabs[i].capacity) for i in measured])
            )
            for index, rate in zip(measured, measured_rates, strict=True):
                rates[index] = self.weights[self.directories[index]] = rate
        planned = self._apportion(needs, rates, disks, room)
        totals = _totals(planned, len(disks))
        for slab, size in sorted(
            zip(self.slabs, totals, strict=True), key=lambda pair: pair[1] - pair[0].capacity
        ):
            slab.resize(size)  # slabs that shrink come first: others may grow on the same file system
        for index, slab in enumerate(self.slabs):
            if index in striped and not slab.capacity:
                log.warning(
                    "nvme_path %s is not used: by its speed and free space, none of the swap space is placed on it",
                    slab.directory,
                )
            weight = self.weights.get(slab.directory)
            speed = f"{format_size(weight)}/s measured" if weight else "not measured"
            log.info("swap space in %s: %s, %s", slab.directory, format_size(slab.capacity), speed)
        return planned

    def _open(self, index: int, nbytes: int) -> None:
        slab = SlabFile(self.directories[index], nbytes, self._aio, allow_memory_file_system=self._allow)
        self.slabs = (*self.slabs, slab)

    def _apportion(
        self, needs: Mapping[str, Need], rates: Sequence[int], disks: Sequence[int], room: Mapping[int, int]
    ) -> list[dict[int, int]]:
        placed = apportion(list(needs.values()), rates, disks, room)
        if placed is not None:
            return placed
        if len(disks) == 1:
            total = sum(need.nbytes for need in needs.values())
            raise too_full(self.directories[0], total, room[disks[0]])
        requested = ", ".join(
            f"{need.nbytes} bytes for {name} in {' and '.join(str(self.directories[path]) for path in need.paths)}"
            for name, need in needs.items()
        )
        first = dict(zip(reversed(disks), reversed(self.directories), strict=True))
        free = ", ".join(f"{nbytes} in the file system of {first[disk]}" for disk, nbytes in room.items())
        raise SwapSpaceError(
            f"the swap files need {requested}, but the free space is {free}; free some space, name more directories"
            " in nvme_path, or raise host_budget so that less is swapped"
        )

    def _warn_of_shared_disks(self, needs: Mapping[str, Need]) -> None:
        for paths in {tuple(sorted(need.paths)) for need in needs.values()}:  # sections often share theirs
            on_disk: defaultdict[str, list[str]] = defaultdict(list)
            for path in paths:
                on_disk[disk_of(self.directories[path])].append(str(self.directories[path]))
            for together in on_disk.values():
                if len(together) > 1:
                    log.log(
                        _logs.once(logging.WARNING),
                        "nvme_path %s are on one disk: striping over them is not faster than using one of them",
                        " and ".join(together),
                    )


def _directories(sections: Mapping[str, Section], allow_memory_file_system: bool) -> tuple[Path, ...]:
    """The directories of all sections, once each, in order. Raises SwapSpaceError for an unsuitable one."""
    directories: dict[Path, None] = {}
    for section in sections.values():
        resolved = [path.resolve() for path in section.paths]
        twice = [path for path, times in Counter(resolved).items() if times > 1]
        if twice:
            raise SwapSpaceError(f"nvme_path names {twice[0]} twice; name each directory once")
        for path in resolved:
            directories[check_directory(path, allow_memory_file_system=allow_memory_file_system)] = None
    return tuple(directories)


def _totals(planned: Sequence[Mapping[int, int]], paths: int) -> list[int]:
    return [sum(by_path.get(path, 0) for by_path in planned) for path in range(paths)]
