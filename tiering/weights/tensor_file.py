"""Writes safetensors files sequentially, past the page cache, through a few windows of memory.

The content of a file is known in advance: the header is written first and the space is reserved, so a full disk fails
immediately. Bytes are copied into windows; a full window is written while the next one fills.
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
"""Bytes per write to disk."""

SumSink = Callable[[int, "np.ndarray"], None]
"""Called with the first page number and the checksums of consecutive pages of a file."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: ``dtype`` is its name in the format, such as "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, prod(self.shape))


def header_of(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with ``tensors`` in order, padded to whole pages."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (round_up(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def pages_of(tensors: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """The number of pages of a file with ``tensors``, including an incomplete last page."""
    nbytes = len(header_of(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors)
    return round_up(nbytes) // PAGE


class Output:
    """An I/O context and the windows that files are written through. Not thread-safe."""

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
        """Waits for the transfers in flight and closes the I/O context."""
        self.aio.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The writer of the file has already raised the failure.
        with contextlib.suppress(SwapError):
            self.close()


class TensorFileWriter:
    """Writes the file ``path``, which must not exist, with ``tensors``; their bytes must be appended in this order.

    Between two calls it holds at most one window of ``output`` that is not being written. ``on_sums`` is called with
    the CRC32C of every page. Raises CheckpointError if the disk is full or fails; then call ``abandon``.
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
        # Bytes in the window.
        self._filled = 0
        # Offset of the window in the file.
        self._at = 0
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
        """Appends the next bytes, any number of them, contiguous; they are copied."""
        source = np.frombuffer(content, dtype=np.uint8)
        if self._at + self._filled + source.size > self.nbytes:
            raise ValueError(f"{self.path} must have {self.nbytes} bytes, but more were appended")
        copied = 0
        while copied < source.size:
            if self._window is None:
                with naming(self.path, self.nbytes):
                    self._window = self._output.windows.lease(WINDOW, "window", alone=True)
                self._filled = 0
            count = min(source.size - copied, WINDOW - self._filled)
            into = np.frombuffer(self._window.view, dtype=np.uint8)
            into[self._filled : self._filled + count] = source[copied : copied + count]
            self._filled += count
            copied += count
            if self._filled == WINDOW:
                self._send()

    def close(self) -> None:
        """Writes the last window and waits until the file is on disk (fsync)."""
        if self._at + self._filled != self.nbytes:
            raise ValueError(f"{self.path} must have {self.nbytes} bytes, not {self._at + self._filled}")
        self._send()
        with naming(self.path, self.nbytes):
            # This also waits for windows of other files, which are written soon.
            self._output.windows.drain()
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        self._give_up_file()

    def abandon(self) -> None:
        """Stops writing; the incomplete file stays on disk."""
        if self._window is not None:
            self._window.release()
            self._window = None
        # Only SwapError is suppressed: the file must stay open while one of its windows is in flight.
        with contextlib.suppress(SwapError):
            self._output.windows.drain()
        self._give_up_file()

    def _give_up_file(self) -> None:
        if self._fd >= 0:
            close_alone(self._fd)
            self._fd = -1

    def _send(self) -> None:
        """Begins to write the window to disk."""
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
            # Retire the window before the write begins: if an exception follows, it is still freed when the write ends.
            self._window, self._filled = None, 0
            window.retire(ticket)
            ticket.begin()
        self._at += filled


# Its name is that of a function, because it is used like one.
class naming:  # noqa: N801
    """Context manager that raises CheckpointError about the file ``path`` in place of an OSError.

    ``nbytes`` is the size of the file, for the message on a full disk.
    """

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        self._path = path
        self._nbytes = nbytes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An OSError of the system has a number; one that a signal handler raises does not.
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
    """A descriptor of a new file, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return open_alone(path, flags | os.O_DIRECT), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some kernels create the file before they refuse O_DIRECT.
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return open_alone(path, flags), False


def _reserve(fd: int, nbytes: int) -> None:
    """Reserves the space of the file, if the file system supports it. Raises OSError if the disk is full."""
    code = -int(lib.aio_reserve(fd, round_up(nbytes)))
    if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
