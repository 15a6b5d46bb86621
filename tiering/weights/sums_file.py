"""Writes the file with the checksums of a rank's files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tiering.storage.arena import PAGE, round_up
from tiering.storage.descriptors import close_alone, open_alone
from tiering.weights.pages import SUM, sums_of_bytes
from tiering.weights.tensor_file import SumSink, TensorSpec, header_of, naming

# Bytes per read: whole pages.
_PIECE = 1 << 20


class SumsFile:
    """The new file ``path`` with the checksums of other files, which have ``pages`` pages each, by file name.

    Checksums may arrive in any order. The last tensor, which has the name of this file, has the checksums of the pages
    before that tensor.
    """

    def __init__(
        self, path: Path, pages: Mapping[str, int], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        tensors, header = _laid_out(path.name, pages, metadata or {})
        self._begins: dict[str, int] = {}
        self._fd = -1
        at = len(header)
        for tensor in tensors:
            self._begins[tensor.name] = at
            at += tensor.nbytes
        self.nbytes = at
        with naming(path, at):
            self._fd = open_alone(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                os.truncate(self._fd, at)
                self._write(header, 0)
            except BaseException:
                self.abandon()
                raise

    def of(self, name: str) -> SumSink:
        """A function that writes checksums of consecutive pages of the file ``name``."""
        begin = self._begins[name]

        def put(page: int, sums: np.ndarray) -> None:
            with naming(self.path, self.nbytes):
                self._write(sums.tobytes(), begin + page * SUM)

        return put

    def _write(self, content: bytes, at: int) -> None:
        """Writes all of ``content``: on a nearly full disk, pwrite writes only a part and returns its size."""
        written = 0
        while written < len(content):
            written += os.pwrite(self._fd, content[written:], at + written)

    def close(self) -> str:
        """Completes the file and waits until it is on disk; returns the SHA-256, in hexadecimal, of the last tensor."""
        with naming(self.path, self.nbytes):
            digest = self._write_own()
            os.fsync(self._fd)
        self.abandon()
        return digest

    def _write_own(self) -> str:
        """Writes the checksums of this file's own pages, read back from the page cache; returns their SHA-256."""
        end, digest = self._begins[self.path.name], hashlib.sha256()
        for at in range(0, end, _PIECE):
            sums = sums_of_bytes(os.pread(self._fd, min(_PIECE, end - at), at)).tobytes()
            self._write(sums, end + at // PAGE * SUM)
            digest.update(sums)
        return digest.hexdigest()

    def abandon(self) -> None:
        """Closes the file in its current state. A second call does nothing."""
        if self._fd >= 0:
            close_alone(self._fd)
            self._fd = -1


def _laid_out(
    own: str, pages: Mapping[str, int], metadata: Mapping[str, str]
) -> tuple[list[TensorSpec], bytes]:
    """The tensors and the header of a file with the checksums of ``pages`` and, under the name ``own``, of itself."""
    tensors_of_files = [TensorSpec(name, "U32", (count,)) for name, count in pages.items()]
    nbytes = sum(tensor.nbytes for tensor in tensors_of_files)
    count = 0
    # The header has checksums too, and its length depends on their number: repeat until both agree.
    while True:
        tensors = [*tensors_of_files, TensorSpec(own, "U32", (count,))]
        header = header_of(tensors, metadata)
        needed = round_up(len(header) + nbytes) // PAGE
        if needed <= count:
            return tensors, header
        count = needed
