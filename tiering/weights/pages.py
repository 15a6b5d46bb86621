"""CRC32C checksums of files, one for each page of 4096 bytes: computed on writing, compared on reading.

The checksums of a file are a U32 tensor in another file, so that they can be read in pieces for files of any size. The
pages of that other file have checksums too, 1/1024 of its size, which are kept in memory. An incomplete last page
counts as padded with zeros.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from tiering._aio import ffi, lib
from tiering.errors import CheckpointError
from tiering.storage.arena import PAGE, round_up
from tiering.storage.descriptors import close_alone, open_alone
from tiering.weights.files import StoredTensor

# Bytes of a checksum.
SUM = 4
SUMS = 1 << 18
"""Checksums that are copied at once."""


def sums_of(address: int, pages: int) -> np.ndarray:
    """The checksums (uint32) of ``pages`` whole pages of memory at ``address``."""
    sums = np.empty(pages, dtype="<u4")
    lib.aio_checksum(ffi.cast("void *", address), pages, ffi.from_buffer("uint32_t[]", sums))
    return sums


def sums_of_bytes(content: bytes) -> np.ndarray:
    """The checksums (uint32) of the pages of ``content``."""
    pages = np.zeros(round_up(len(content)), dtype=np.uint8)
    pages[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return sums_of(pages.ctypes.data, pages.size // PAGE)


class KnownSums:
    """The checksums of a file, in memory."""

    def __init__(self, sums: np.ndarray) -> None:
        self._sums = sums

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """Like that of PageSums; a page without a checksum counts as different."""
        expected = self._sums[page : page + pages]
        differ = np.flatnonzero(sums_of(address, len(expected)) != expected)
        if differ.size:
            return page + int(differ[0])
        return None if len(expected) == pages else page + len(expected)


class SumsSource:
    """A file with checksums. It is opened at the first read and stays open as long as this object exists.

    With ``own``, the checksums of its pages up to byte ``end``, all reads are verified.
    """

    def __init__(self, path: Path, own: np.ndarray | None = None, end: int = 0) -> None:
        self._path = path
        self._own = own
        self._end = end
        self._fd = -1

    def read(self, offset: int, nbytes: int) -> bytes:
        """Reads ``nbytes``, or fewer at the end of the file. Raises OSError; CheckpointError if a page is damaged."""
        if self._fd < 0:
            self._fd = open_alone(self._path, os.O_RDONLY | os.O_NONBLOCK)
            weakref.finalize(self, close_alone, self._fd)
        if self._own is None:
            return os.pread(self._fd, nbytes, offset)
        page = offset // PAGE
        begin = page * PAGE
        content = os.pread(self._fd, min(round_up(offset + nbytes), self._end) - begin, begin)
        sums = sums_of_bytes(content)
        differ = np.flatnonzero(sums != self._own[page : page + sums.size])
        if differ.size:
            raise CheckpointError(
                f"{self._path}: CRC32C mismatch in page {page + int(differ[0])}; load an earlier checkpoint"
            )
        return content[offset - begin : offset - begin + nbytes]


class PageSums:
    """The checksums of one file, in the tensor ``stored`` of another file, which ``source`` reads."""

    def __init__(self, stored: StoredTensor, source: SumsSource) -> None:
        self._stored = stored
        self._source = source

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """The first of ``pages`` whole pages in memory at ``address`` that differs from the file, from ``page`` on.

        Raises CheckpointError if the checksums cannot be read.
        """
        expected = self.read(page, pages)
        differ = np.flatnonzero(sums_of(address, pages) != expected)
        return page + int(differ[0]) if differ.size else None

    def read(self, page: int, pages: int) -> np.ndarray:
        """The checksums (uint32) of these pages. Raises CheckpointError if they cannot be read."""
        if page + pages > self._stored.numel:
            raise CheckpointError(
                f"{self._stored.file}: it has {self._stored.numel} checksums of {self._stored.name!r}, which has more"
                " pages; load an earlier checkpoint"
            )
        try:
            content = self._source.read(self._stored.offset + page * SUM, pages * SUM)
        except OSError as error:
            raise CheckpointError(
                f"{self._stored.file}: it cannot be read: {error.strerror}; load an earlier checkpoint"
            ) from error
        if len(content) != pages * SUM:
            raise CheckpointError(f"{self._stored.file}: it is truncated; load an earlier checkpoint")
        return np.frombuffer(content, dtype="<u4")


class SwapSums(PageSums):
    """The checksums of a swap file, for the pages that a snapshot has: other pages have 0, and are not compared.

    The file may have grown since.
    """

    def read(self, page: int, pages: int) -> np.ndarray:
        """Like that of PageSums."""
        known = max(0, min(pages, self._stored.numel - page))
        sums = np.zeros(pages, dtype="<u4")
        if known:
            sums[:known] = super().read(page, known)
        return sums

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """Like that of PageSums."""
        expected, found = self.read(page, pages), sums_of(address, pages)
        # A checksum of 0 is stored as 1.
        differ = np.flatnonzero((expected != 0) & (np.maximum(found, 1) != expected))
        return page + int(differ[0]) if differ.size else None

    def compares(self, page: int, pages: int) -> bool:
        """Whether one of these pages has a checksum."""
        return bool(self.read(page, pages).any())
