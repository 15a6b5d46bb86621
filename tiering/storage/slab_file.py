"""Slabs: a swap file cut into extents."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tiering._text import shorten
from tiering.errors import SwapSpaceError
from tiering.storage.aio import AioContext
from tiering.storage.arena import FreeRanges, round_up
from tiering.storage.named_files import NamedFile
from tiering.storage.swap_file import SwapFile, check_directory


@dataclass(eq=False)
class Extent:
    """A range of a slab file: ``nbytes`` at ``offset``, both multiples of 4096."""

    offset: int
    nbytes: int


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
            self._free.free(end, self._swap.nbytes - end)

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
                return Extent(start, size)
        raise SwapSpaceError(
            f"swap file in {self.directory}: no extent of {size} bytes left for {shorten(names)}"
            f" ({self.used} of {self.capacity} bytes used); raise nvme_budget"
        )

    def free(self, extent: Extent) -> None:
        """Free an extent, of which no transfer is in flight.

        It has zero bytes afterwards, so that later transfers of it are refused: its range may have a new owner.
        """
        with self._lock:
            # Before the range is free: an owner that still has the extent can begin no transfer any more.
            nbytes, extent.nbytes = extent.nbytes, 0
            if nbytes:
                self._free.free(extent.offset, nbytes)
                self.used -= nbytes

    @property
    def is_public(self) -> bool:
        """Whether the file has a name: it may be that of a snapshot."""
        return self._swap.is_public

    def adopt(self, fd: int, path: Path, extents: Iterable[tuple[int, int]]) -> list[Extent]:
        """Use the file ``fd``, whose name is ``path``, from now on; see SwapSpace.adopt.

        It has ``extents``, offsets and bytes, in place of all that were there.
        """
        free = FreeRanges(os.fstat(fd).st_size)
        adopted = [Extent(offset, nbytes) for offset, nbytes in extents]
        for each in adopted:
            start = free.allocate(each.nbytes, at=each.offset)
            assert start is not None, "a layout has no overlaps"
        number = self.aio.add_file(fd, direct=self._swap.direct, name=str(self.directory))
        with self._lock:
            self.file, self._free, self.used = number, free, sum(each.nbytes for each in adopted)
            self._swap.adopt(fd, path)
        return adopted

    def named(self, label: str) -> NamedFile:
        """See SwapSpace.named."""
        return self._swap.named(label)

    def publish(self) -> None:
        """See SwapSpace.publish."""
        self._swap.publish()

    def withdraw(self) -> None:
        """See SwapSpace.withdraw."""
        self._swap.withdraw()

    def close(self) -> None:
        """Close the descriptor; the kernel frees the space, unless the file has a name. The I/O context must have been
        closed first.
        """
        self._swap.close()
