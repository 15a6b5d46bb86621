"""CRC32C of files by the page of 4096 bytes: made as they are written, compared as they are read.

The sums of a file are a tensor of U32 in another one, so that they are read a few at a time, whatever the file's size.
A last page that is not whole counts as filled up with zeros.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from tiering._aio import ffi, lib
from tiering.descriptors import close_alone, open_alone
from tiering.errors import CheckpointError
from tiering.weights.files import StoredTensor

SUM = 4  # bytes


def sums_of(address: int, pages: int) -> np.ndarray:
    """The sums (uint32) of ``pages`` whole pages of memory at ``address``."""
    sums = np.empty(pages, dtype="<u4")
    lib.aio_checksum(ffi.cast("void *", address), pages, ffi.from_buffer("uint32_t[]", sums))
    return sums


class SumsSource:
    """A file with sums, which is opened when it is first read, and stays so as long as somebody has this."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def read(self, at: int, nbytes: int) -> bytes:
        """Fewer bytes where the file ends. Raises OSError."""
        if self._fd < 0:
            self._fd = open_alone(self._path, os.O_RDONLY)
            weakref.finalize(self, close_alone, self._fd)
        return os.pread(self._fd, nbytes, at)


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
