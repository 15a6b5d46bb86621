"""The ground of a load: private files, which nobody else has a name for and which end with the process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tiering.errors import SwapSpaceError, UnsafeTargetError
from tiering.storage.swap_file import IN_TRAINING, SwapFile


class Ground:
    """Private files of ``size`` bytes, one per directory and job, reserved; with what of them was written once.

    ``lost`` says what the file systems do not give, by directory. ``max_write`` bytes may be written in all, if that is
    set. Raises UnsafeTargetError where O_DIRECT was asked for and is refused, SwapSpaceError where there is no room.
    """

    def __init__(
        self, directories: Sequence[Path], *, size: int, numjobs: int = 1, direct: bool = True
    ) -> None:
        self.directories = tuple(directories)
        self.size = size
        self.direct = direct
        self.files: list[list[SwapFile]] = []  # by job and directory
        self.lost: dict[Path, tuple[str, ...]] = {}
        self.max_write: int | None = None
        self.read_bytes = 0
        self.written_bytes = 0  # of windows that are over
        self.full = False  # whether the last window ended because of ``max_write``
        self._taken = 0  # to be written by the window under way (lock)
        self._lock = threading.Lock()
        try:
            for _ in range(numjobs):
                self.files.append([])
                for directory in self.directories:
                    file = _private_file(directory, size, direct)
                    self.files[-1].append(file)
                    self.lost[directory] = file.lost
                    if direct and not file.direct:
                        raise UnsafeTargetError(
                            f"{directory} refuses O_DIRECT, so its drive cannot be told from the page cache; name"
                            " another directory, or measure memory and drive together with --direct 0"
                        )
        except BaseException:
            self.close()
            raise
        self.written_once = [[0 for _ in self.directories] for _ in range(numjobs)]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return self.size * sum(len(files) for files in self.files)

    def may_write(self, nbytes: int) -> bool:
        """Whether ``max_write`` has room for so many bytes more; if so they are taken. Every lane asks."""
        with self._lock:
            if self.max_write is not None and self.written_bytes + self._taken + nbytes > self.max_write:
                self.full = True
                return False
            self._taken += nbytes
            return True

    def count(self, read: int, written: int) -> None:
        """A window is over, in which so many bytes were moved."""
        with self._lock:
            self._taken = 0
            self.read_bytes += read
            self.written_bytes += written

    def close(self) -> None:
        """Close the files, and the kernel frees their space. Loads over them must be closed first."""
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
