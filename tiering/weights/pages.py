"""CRC32C of files by the page of 4096 bytes: made as they are written, compared as they are read.

The sums of a file are a tensor of U32 in another one, so that they are read a few at a time, whatever the file's size.
The pages of that other one have sums, too, which are a 1024th of it and are kept in memory. A last page that is not
whole counts as filled up with zeros.
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

SUM = 4  # bytes


def sums_of(address: int, pages: int) -> np.ndarray:
    """The sums (uint32) of ``pages`` whole pages of memory at ``address``."""
    sums = np.empty(pages, dtype="<u4")
    lib.aio_checksum(ffi.cast("void *", address), pages, ffi.from_buffer("uint32_t[]", sums))
    return sums


def sums_of_bytes(content: bytes) -> np.ndarray:
    """The sums (uint32) of the pages of ``content``."""
    pages = np.zeros(round_up(len(content)), dtype=np.uint8)
    pages[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return sums_of(pages.ctypes.data, pages.size // PAGE)


class KnownSums:
    """The sums of a file, in memory."""

    def __init__(self, sums: np.ndarray) -> None:
        self._sums = sums

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """As that of PageSums; a page without a sum differs."""
        expected = self._sums[page : page + pages]
        differ = np.flatnonzero(sums_of(address, len(expected)) != expected)
        if differ.size:
            return page + int(differ[0])
        return None if len(expected) == pages else page + len(expected)


class SumsSource:
    """A file with sums, which is opened when it is first read, and stays so as long as somebody has this.

    If ``own`` is given, the sums of its pages up to byte ``end``, all that is read is compared with them.
    """

    def __init__(self, path: Path, own: np.ndarray | None = None, end: int = 0) -> None:
        self._path = path
        self._own = own
        self._end = end
        self._fd = -1

    def read(self, at: int, nbytes: int) -> bytes:
        """Fewer bytes where the file ends. Raises OSError, or CheckpointError where they are not what was written."""
        if self._fd < 0:
            self._fd = open_alone(self._path, os.O_RDONLY | os.O_NONBLOCK)
            weakref.finalize(self, close_alone, self._fd)
        if self._own is None:
            return os.pread(self._fd, nbytes, at)
        page = at // PAGE
        begin = page * PAGE
        content = os.pread(self._fd, min(round_up(at + nbytes), self._end) - begin, begin)
        found = sums_of_bytes(content)
        differ = np.flatnonzero(found != self._own[page : page + found.size])
        if differ.size:
            raise CheckpointError(
                f"{self._path}: page {page + int(differ[0])} is not what was written: it has another CRC32C; load an"
                " earlier checkpoint"
            )
        return content[at - begin : at - begin + nbytes]


class PageSums:
    """The sums of one file, in the tensor ``stored`` of another, which is read from ``source``."""

    def __init__(self, stored: StoredTensor, source: SumsSource) -> None:
        self._stored = stored
        self._source = source

    def first_difference(self, address: int, page: int, pages: int) -> int | None:
        """The first of ``pages`` whole pages in memory at ``address`` that is not page ``page + i`` of the file.

        Raises CheckpointError if the sums cannot be read.
        """
        expected = self._read(page, pages)
        differ = np.flatnonzero(sums_of(address, pages) != expected)
        return page + int(differ[0]) if differ.size else None

    def _read(self, page: int, pages: int) -> np.ndarray:
        if page + pages > self._stored.numel:
            raise CheckpointError(
                f"{self._stored.file}: it has {self._stored.numel} sums of {self._stored.name!r}, which has more pages;"
                " load an earlier checkpoint"
            )
        try:
            content = self._source.read(self._stored.offset + page * SUM, pages * SUM)
        except OSError as error:
            raise CheckpointError(
                f"{self._stored.file}: it cannot be read: {error.strerror}; load an earlier checkpoint"
            ) from error
        if len(content) != pages * SUM:
            raise CheckpointError(f"{self._stored.file}: it is cut short; load an earlier checkpoint")
        return np.frombuffer(content, dtype="<u4")
