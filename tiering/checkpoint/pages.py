"""CRC32C of files by the page of 4096 bytes: made as they are written, compared as they are read.

The sums of a file are a tensor of U32 in another one, so that they are read a few at a time, whatever the file's size.
A last page that is not whole counts as filled up with zeros.
"""

from __future__ import annotations

import os

import numpy as np

from tiering._aio import ffi, lib
from tiering.errors import CheckpointError
from tiering.weights.files import StoredTensor

SUM = 4  # bytes


def sums_of(address: int, pages: int) -> np.ndarray:
    """The sums (uint32) of ``pages`` whole pages of memory at ``address``."""
    sums = np.empty(pages, dtype="<u4")
    lib.aio_checksum(ffi.cast("void *", address), pages, ffi.from_buffer("uint32_t[]", sums))
    return sums


class PageSums:
    """The sums of one file, in the tensor ``stored`` of another."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

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
            fd = os.open(self._stored.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = os.pread(fd, pages * SUM, self._stored.offset + page * SUM)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(
                f"{self._stored.file}: it cannot be read: {error.strerror}; load an earlier checkpoint"
            ) from error
        if len(content) != pages * SUM:
            raise CheckpointError(f"{self._stored.file}: it is cut short; load an earlier checkpoint")
        return np.frombuffer(content, dtype="<u4")
