"""Swap space: all the slabs of a rank, one per path, and the extents that lie on several of them.

Each kind of state has its own paths (a *section*). The size of a section is divided over its paths in proportion to
their measured bandwidth, as far as they have room (see striping.py); a slab is as large as the sum of its parts. All
transfers use one I/O context, which has a queue for each path, so a slow path delays only transfers of its own bytes.
New extents use less of a path that becomes slow (path_speeds.py); existing extents keep their places.

A transfer over several paths is one request (``AioContext.prepare_vector``): it is submitted as a whole or not at all,
and the memory is free when all its pieces are done. An extent keeps its transfers in order (striped_extent.py).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering._text import shorten
from tiering.config.training import format_size
from tiering.errors import SwapError, SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, round_up
from tiering.storage.io_stats import FileStats
from tiering.storage.named_files import AdoptedFile, NamedFile, check_links
from tiering.storage.path_speeds import PathSpeeds
from tiering.storage.request import Buffer
from tiering.storage.slab_file import SlabFile
from tiering.storage.slabs import open_slabs
from tiering.storage.striped_extent import ExtentPart, OrderedTransfer, StripedExtent, TransferOrder
from tiering.storage.striping import Need, StripeMap, shares_of
from tiering.storage.swap_file import check_directory
from tiering.storage.swap_layout import ExtentLayout, SwapLayout
from tiering.storage.tasks import Task
from tiering.storage.tickets import Ticket
from tiering.storage.versions import Kept, Versions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """The swap space of one kind of state: ``nbytes``, a multiple of 4096, over ``paths``."""

    nbytes: int
    paths: tuple[Path, ...]


class SwapSpace:
    """Swap space for ``sections``, reserved. Thread-safe.

    ``weights`` are bytes per second of each measured path; the paths of a section with several paths are measured.
    Raises SwapSpaceError when a directory cannot hold swap space or the sections do not fit, with the numbers.
    """

    def __init__(
        self, sections: Mapping[str, Section], aio: AioContext, *, allow_memory_file_system: bool = False
    ) -> None:
        self.directories = _directories(sections, allow_memory_file_system)
        self.aio = aio
        # By purpose, extents that were written since the last ``keep``.
        self._changed: dict[Kept, dict[StripedExtent, None]] = {purpose: {} for purpose in Kept}
        self._lock = threading.Lock()
        # Held while transfers are ordered and submitted, so that all paths have writes of one range in the same order;
        # a run of tasks holds it as a whole. Always entered directly, as a C function.
        self.ordering = threading.RLock()
        number = {directory: index for index, directory in enumerate(self.directories)}
        needs = {
            name: Need(section.nbytes, tuple(number[path.resolve()] for path in section.paths))
            for name, section in sections.items()
        }
        opened = open_slabs(needs, self.directories, aio, allow_memory_file_system=allow_memory_file_system)
        self.slabs, self.weights = opened.slabs, opened.weights
        self.speeds = PathSpeeds.measured({str(path): rate for path, rate in self.weights.items()})
        self._planned = {
            name: [by_path.get(index, 0) for index in range(len(self.slabs))]
            for name, by_path in zip(needs, opened.planned, strict=True)
        }
        self._remaining = {name: list(nbytes) for name, nbytes in self._planned.items()}

    def allocate(
        self, nbytes: int, names: tuple[str, ...], section: str, *, kept: Collection[Kept] = ()
    ) -> StripedExtent:
        """An extent of ``nbytes`` rounded up to 4096 on the paths of ``section``; SwapSpaceError when none is left.

        Each of the purposes for which its content is ``kept`` takes as much room once more.
        """
        if nbytes <= 0:
            raise ValueError(f"an extent has at least one byte, not {nbytes} ({shorten(names)})")
        length = round_up(nbytes)
        size = length * Versions.count(kept)
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
        stripes = StripeMap([part.extent.nbytes for part in parts])
        order = TransferOrder(Versions(length, kept) if kept else None)
        return StripedExtent(length, names, section, tuple(parts), stripes, order)

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
        for changed in self._changed.values():
            changed.pop(extent, None)
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
        kept: Kept | None = None,
    ) -> Ticket:
        """Start reading ``nbytes`` (default: the buffer's) at ``offset`` of ``extent`` into ``buffer``.

        The content is the current one, or what is ``kept`` for a purpose since ``keep``.

        A signal handler may raise before the caller has the ticket: after an exception, ``settle`` the extent before
        the memory is released.
        """
        with self.ordering:
            return self.ordered(extent, buffer, offset, nbytes, priority, writes=False, kept=kept).begin()

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

    def check_whole(self, extent: StripedExtent) -> None:
        """Wait until the current content of ``extent`` is written; raises the SwapError of a write that failed."""
        with self.ordering:
            extent.order.check_written(0, extent.nbytes)

    def check_written_within(self, parts: Sequence[tuple[StripedExtent, int, int]], *, wait: bool) -> bool:
        """Whether the current content of ``parts``, extents with first byte and end, is written; ``wait`` for that.

        If a write failed, the kept content of all of them becomes the current one, and its SwapError is raised.
        """
        if not wait and not all(extent.order.is_idle for extent, _, _ in parts):
            return False
        with self.ordering:
            try:
                for extent, start, end in parts:
                    extent.order.check_written(start, end)
            except SwapError:
                for extent, start, end in parts:
                    extent.order.go_back(start, end)
                raise
        return True

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
        kept: Kept | None = None,
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
        for purpose in extent.kept if writes else ():
            self._changed[purpose][extent] = None
        ranges, after = extent.order.place(offset, offset + length, writes, kept)
        ticket = self.aio.prepare_vector(
            "write" if writes else "read",
            buffer,
            extent.pieces(ranges),
            priority=priority,
            after=(*first, *after),
            names=extent.names,
        )
        return OrderedTransfer(extent.order, ticket, offset, offset + length, ranges, writes)

    def check_written(self, purpose: Kept) -> None:
        """Wait for the writes of the content that ``keep`` would keep. Raises the SwapError of one that failed."""
        with self.ordering:
            for extent in self._changed[purpose]:
                extent.order.check_written(0, extent.nbytes)

    def keep(self, purpose: Kept = Kept.STEP) -> None:
        """Keep the current content, where it is kept for ``purpose``: later writes do not overwrite it.

        Waits for the writes of this content. If one of them failed, its SwapError is raised, and what was kept before
        is kept. After another exception, ``keep`` has to be called again before the next write.
        """
        with self.ordering:
            self.check_written(purpose)
            for extent in self._changed[purpose]:
                extent.order.keep(purpose)
            self._changed[purpose].clear()

    def go_back(self) -> None:
        """Make the content that is kept for steps the current one; after an exception, call it again."""
        with self.ordering:
            for extent in self._changed[Kept.STEP]:
                extent.order.go_back(0, extent.nbytes)
            # A snapshot since then has kept what was written, which is not current any more.
            self._changed[Kept.SNAPSHOT] |= {
                extent: None for extent in self._changed[Kept.STEP] if Kept.SNAPSHOT in extent.kept
            }
            self._changed[Kept.STEP].clear()

    @property
    def files(self) -> list[SlabFile]:
        """The slabs that have room."""
        return [slab for slab in self.slabs if slab.capacity]

    def layout(self, extents: Sequence[StripedExtent]) -> SwapLayout:
        """Where ``extents`` are in the ``files``."""
        files = {slab: number for number, slab in enumerate(self.files)}
        return SwapLayout(
            {
                name: tuple(planned[self.slabs.index(slab)] for slab in files)
                for name, planned in self._planned.items()
            },
            tuple(
                ExtentLayout(
                    each.section,
                    each.nbytes,
                    tuple(purpose.value for purpose in each.kept),
                    tuple((files[part.slab], part.extent.offset, part.extent.nbytes) for part in each.parts),
                    () if each.order.versions is None else each.order.versions.runs(),
                )
                for each in extents
            ),
        )

    def adopt(
        self, layout: SwapLayout, extents: Sequence[StripedExtent], adopted: Sequence[AdoptedFile]
    ) -> None:
        """Use ``adopted``, in place of ``files``, with the ``layout`` that they have for the same plan.

        ``extents`` are all there are. What a snapshot keeps has the content of the files, and stays kept; the content
        of the rest is undefined. The files belong to the swap space from now on.
        """
        with self.ordering, self._lock:
            for extent in extents:
                self.settle(extent)
            assert self.used == sum(part.extent.nbytes for extent in extents for part in extent.parts)
            parts: dict[tuple[int, int], ExtentPart] = {}
            for number, (slab, file) in enumerate(zip(self.files, adopted, strict=True)):
                here = [part[1:] for each in layout.extents for part in each.parts if part[0] == number]
                for extent_there in slab.adopt(file.take(), file.path, here):
                    parts[number, extent_there.offset] = ExtentPart(slab, extent_there)
            for extent, place in zip(extents, layout.extents, strict=True):
                extent.move([parts[number, offset] for number, offset, _ in place.parts])
                if place.is_kept and extent.order.versions is not None:
                    extent.order.versions.restore_kept(place.versions)
            numbers = [self.slabs.index(slab) for slab in self.files]
            for name, sizes in layout.sections.items():
                for number, nbytes in zip(numbers, sizes, strict=True):
                    self._planned[name][number] = self._remaining[name][number] = nbytes
            for extent in extents:
                for part in extent.parts:
                    self._remaining[extent.section][self.slabs.index(part.slab)] -= part.extent.nbytes
            for changed in self._changed.values():
                changed.clear()

    def check_links(self) -> None:
        """SwapSpaceError if a directory cannot hold files that get names: see ``publish``."""
        for directory in self.directories:
            check_links(directory)

    def named(self, label: str) -> dict[SlabFile, NamedFile]:
        """The files with the names, with ``label``, that ``publish`` gives them."""
        return {slab: slab.named(label) for slab in self.files}

    def publish(self, files: Iterable[SlabFile]) -> None:
        """Give the ``files`` their names, with which they outlive the process.

        They are on the disk when this returns, with all that was written. Raises SwapSpaceError.
        """
        for slab in files:
            slab.publish()

    def withdraw(self) -> None:
        """Remove the names of the files: no snapshot needs them."""
        for slab in self.slabs:
            slab.withdraw()

    def run(self, tasks: Sequence[Task], transfers: Sequence[OrderedTransfer]) -> None:
        """Run ``tasks``, which begin these ``transfers``; see ``AioContext.run``. The caller holds ``ordering``."""
        # All before the first is submitted: whatever interrupts the run, ``settle`` finds those that have begun.
        for transfer in transfers:
            transfer.store()
        self.aio.run(tasks)


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
