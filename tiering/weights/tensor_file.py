"""Writes safetensors files from their beginning to their end, around the page cache, through a few windows of memory.

What a file will hold is known before its first byte: the header is written first, the space is reserved, and a disk
that is full says so at once. Bytes are copied into windows; a full one goes to disk while the next is being filled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tiering._aio import lib
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, SwapError
from tiering.storage.aio import AioContext
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.descriptors import close_alone, open_alone
from tiering.storage.file_system import remedy
from tiering.storage.io_stats import errno_text
from tiering.weights.files import nbytes_of
from tiering.weights.pages import sums_of

WINDOW = 2 << 20
"""Bytes that go to disk at once."""

SumSink = Callable[[int, "np.ndarray"], None]
"""Takes the sums of the pages of a file from one on."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: ``dtype`` is the format's word for it, "F32", "BF16" and so on."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, prod(self.shape))


def header_of(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The beginning of a file with ``tensors`` one after the other; it fills whole pages."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (round_up(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def pages_of(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """Pages of a file with ``tensors``, the last one perhaps not whole."""
    nbytes = len(header_of(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors)
    return round_up(nbytes) // PAGE


class Output:
    """What files are written through: an I/O context, and the windows that they share. One thread writes."""

    def __init__(self, io: IoConfig | None = None, *, windows: int = 4) -> None:
        io = io or IoConfig()
        self.windows = Arena.map(windows * WINDOW, "checkpoint")
        self.aio = AioContext(
            engine=io.engine,
            block_size=io.block_size,
            queue_depth=io.queue_depth,
            registered=io.registered,
        )
        self.aio.register(self.windows)

    def close(self) -> None:
        """End the transfers under way."""
        self.aio.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(SwapError):  # what failed was told to the file's writer
            self.close()


class TensorFileWriter:
    """Writes the file ``path``, which must not exist, with ``tensors``: their bytes are appended in that order.

    Between two calls it holds at most one window of ``output`` that is not on its way to disk. ``on_sums`` is told the
    CRC32C of every page. Raises CheckpointError where the disk is full or fails: then ``abandon`` it.
    """

    def __init__(
        self,
        path: Path,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str] | None = None,
        *,
        output: Output,
        on_sums: SumSink | None = None,
    ) -> None:
        self.path = path
        header = header_of(tensors, metadata)
        self.nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self._output = output
        self._on_sums = on_sums
        self._window: Lease | None = None
        self._filled = 0  # bytes in the window
        self._at = 0  # where in the file the window begins
        with naming(path, self.nbytes):
            self._fd, direct = _create(path)
            try:
                _reserve(self._fd, self.nbytes)
                self._file = output.aio.add_file(self._fd, direct=direct, name=str(path))
            except BaseException:
                close_alone(self._fd)
                self._fd = -1
                raise
        self.append(header)

    def append(self, content: bytes | bytearray | memoryview | np.ndarray) -> None:
        """The next bytes, any number of them, contiguous; they are copied."""
        source = np.frombuffer(content, dtype=np.uint8)
        if self._at + self._filled + source.size > self.nbytes:
            raise ValueError(f"{self.path} was to have {self.nbytes} bytes, and more were given")
        taken = 0
        while taken < source.size:
            if self._window is None:
                with naming(self.path, self.nbytes):
                    self._window = self._output.windows.lease(WINDOW, "window", alone=True)
                self._filled = 0
            count = min(source.size - taken, WINDOW - self._filled)
            into = np.frombuffer(self._window.view, dtype=np.uint8)
            into[self._filled : self._filled + count] = source[taken : taken + count]
            self._filled += count
            taken += count
            if self._filled == WINDOW:
                self._send()

    def close(self) -> None:
        """Write what is left, and wait until all is on the disk (fsync)."""
        if self._at + self._filled != self.nbytes:
            raise ValueError(f"{self.path} was to have {self.nbytes} bytes, not {self._at + self._filled}")
        self._send()
        with naming(self.path, self.nbytes):
            self._output.windows.drain()  # also those of other files: they are done soon
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        self._give_up_file()

    def abandon(self) -> None:
        """Give the file up; what there is of it stays on disk."""
        if self._window is not None:
            self._window.release()
            self._window = None
        with contextlib.suppress(SwapError):  # no other: while a window is under way, the file stays open
            self._output.windows.drain()
        self._give_up_file()

    def _give_up_file(self) -> None:
        if self._fd >= 0:
            close_alone(self._fd)
            self._fd = -1

    def _send(self) -> None:
        """The window goes to disk."""
        window, filled = self._window, self._filled
        if window is None or not filled:
            return
        padded = round_up(filled)
        window.view[filled:padded] = bytes(padded - filled)
        if self._on_sums is not None:
            with naming(self.path, self.nbytes):
                self._on_sums(self._at // PAGE, sums_of(window.address, padded // PAGE))
        with naming(self.path, self.nbytes):
            ticket = self._output.aio.prepare("write", self._file, window, self._at, padded)
            # Retired before it is begun: whatever raises in between, the window is free when the disk has done with it.
            self._window, self._filled = None, 0
            window.retire(ticket)
            ticket.begin()
        self._at += filled


class naming:  # noqa: N801 # read as a function
    """What the system or the I/O engine raises inside becomes a CheckpointError about the file ``path``.

    ``nbytes`` is what it needs, where that is worth telling.
    """

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        self._path = path
        self._nbytes = nbytes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The system's errors have a number, what a signal handler raises has none.
        if not isinstance(error, OSError) or error.errno is None:
            return
        code = error.errno or errno.EIO
        path = Path(error.filename) if isinstance(error, SwapError) and error.filename else self._path
        full = self._nbytes and code in (errno.ENOSPC, errno.EDQUOT)
        needs = f" for a file of {self._nbytes} bytes" if full else ""
        raise CheckpointError(
            f"{path}: it cannot be written: {errno_text(code)}{needs}; {remedy(code)}"
        ) from error


def _create(path: Path) -> tuple[int, bool]:
    """A new file, and whether it goes around the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return open_alone(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with contextlib.suppress(FileNotFoundError):  # some kernels have made it by then
        path.unlink()
    return open_alone(path, flags), False


def _reserve(fd: int, nbytes: int) -> None:
    """The space for all of the file, where the file system can promise it."""
    code = -int(lib.aio_reserve(fd, round_up(nbytes)))
    if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
