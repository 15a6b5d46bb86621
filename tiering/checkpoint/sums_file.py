"""Where the sums of a rank's files are kept: a file of their own, written beside them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tiering.checkpoint.pages import SUM
from tiering.checkpoint.writer import SumSink, TensorSpec, header_of, naming
from tiering.descriptors import close_alone, open_alone


class SumsFile:
    """Where the sums of files are written as they come: the new file ``path``, with room for ``pages`` of each file."""

    def __init__(self, path: Path, pages: Mapping[str, int]) -> None:
        self.path = path
        tensors = [TensorSpec(name, "U32", (count,)) for name, count in pages.items()]
        header = header_of(tensors)
        self._begins: dict[str, int] = {}
        self._fd = -1
        at = len(header)
        for tensor in tensors:
            self._begins[tensor.name] = at
            at += tensor.nbytes
        self.nbytes = at
        with naming(path, at):
            self._fd = open_alone(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.truncate(self._fd, at)
                self._write(header, 0)
            except BaseException:
                self.abandon()
                raise

    def of(self, name: str) -> SumSink:
        """Takes the sums of the pages of file ``name`` from one on."""
        begin = self._begins[name]

        def put(page: int, sums: np.ndarray) -> None:
            with naming(self.path, self.nbytes):
                self._write(sums.tobytes(), begin + page * SUM)

        return put

    def _write(self, content: bytes, at: int) -> None:
        """All of it: where a disk is nearly full the system writes a part, and says so by the number alone."""
        written = 0
        while written < len(content):
            written += os.pwrite(self._fd, content[written:], at + written)

    def close(self) -> None:
        """Wait until all is on the disk."""
        with naming(self.path, self.nbytes):
            os.fsync(self._fd)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is. A second call does nothing."""
        if self._fd >= 0:
            close_alone(self._fd)
            self._fd = -1
