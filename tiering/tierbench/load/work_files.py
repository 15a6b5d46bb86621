"""The files of a load: private, unnamed, and freed when the process ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tiering.errors import SwapSpaceError, UnsafeTargetError
from tiering.storage.swap_file import IN_TRAINING, SwapFile


class WorkFiles:
    """Private preallocated files of ``size`` bytes, one per directory and job.

    ``written_once`` has the written bytes of each file, by job and directory. ``missing_features`` has the features
    that the file systems lack, by directory. ``max_write`` limits the bytes that all intervals write. Raises
    UnsafeTargetError if a file system refuses a requested O_DIRECT, SwapSpaceError if the space does not suffice.
    """

    def __init__(
        self, directories: Sequence[Path], *, size: int, numjobs: int = 1, direct: bool = True
    ) -> None:
        self.directories = tuple(directories)
        self.size = size
        self.direct = direct
        self.files: list[list[SwapFile]] = []  # by job and directory
        self.missing_features: dict[Path, tuple[str, ...]] = {}
        self.max_write: int | None = None
        self.read_bytes = 0
        self.written_bytes = 0  # by completed intervals
        self.full = False  # whether ``max_write`` ended the last interval
        # Bytes that the current interval has reserved for writing. The lanes' threads share it under the lock.
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        try:
            for _ in range(numjobs):
                self.files.append([])
                for directory in self.directories:
                    file = _private_file(directory, size, direct)
                    self.files[-1].append(file)
                    self.missing_features[directory] = file.missing_features
                    if direct and not file.direct:
                        raise UnsafeTargetError(
                            f"{directory} refuses O_DIRECT, so a measurement would include the page cache; name"
                            " another directory, or measure with the page cache: --direct 0"
                        )
        except BaseException:
            self.close()
            raise
        self.written_once = [[0 for _ in self.directories] for _ in range(numjobs)]

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        return self.size * sum(len(files) for files in self.files)

    def may_write(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` of ``max_write``; False if they exceed it. Each lane calls this before it writes."""
        with self._lock:
            if (
                self.max_write is not None
                and self.written_bytes + self._reserved_bytes + nbytes > self.max_write
            ):
                self.full = True
                return False
            self._reserved_bytes += nbytes
            return True

    def count(self, read: int, written: int) -> None:
        """Add the bytes of a completed interval, and clear its reservations."""
        with self._lock:
            self._reserved_bytes = 0
            self.read_bytes += read
            self.written_bytes += written

    def close(self) -> None:
        """Close the files; the kernel then frees their space. Close loads over them first."""
        for file in (file for files in self.files for file in files):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _private_file(directory: Path, size: int, direct: bool) -> SwapFile:
    try:
        return SwapFile(directory, size, direct=direct)
    except SwapSpaceError as error:
        raise SwapSpaceError(
            error.message.replace(IN_TRAINING, "give a smaller --size, or name another directory")
        ) from None
