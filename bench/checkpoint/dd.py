"""What the disk gives to dd with O_DIRECT: bytes written, read, and copied from file to file.

A copy is what saving from NVMe is: the state is read from the disk that the checkpoint is written to. dd does one
block after the other, so a copy is a read and then a write; a block size that suits the disk matters, and the faster of
two is taken each time. The kernel's count of each dd says that its bytes were the disk's.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from frame.side import SideError

from .files import removed_from

BLOCKS = (4 << 20, 16 << 20)
SECTOR = 512
"""Unit of ru_inblock and ru_oublock, whatever the disk's is."""


class DdError(SideError):
    """dd failed, or did not move its bytes from or to the disk."""


@dataclass(frozen=True, slots=True)
class Moved:
    """So many bytes, once over for a copy."""

    seconds: float
    nbytes: int

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


class Disk:
    """Files of ``nbytes``, rounded up to whole blocks, in ``directory``, which is the caller's to remove."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._file, self._copy = directory / "file", directory / "copy"
        self.nbytes = -(-nbytes // max(BLOCKS)) * max(BLOCKS)
        self.write()

    def write(self, *, fsync: bool = False) -> Moved:
        """A new file of zeros."""
        return min((self._write(block, fsync) for block in BLOCKS), key=lambda moved: moved.seconds)

    def read(self) -> Moved:
        """The file, to nowhere."""
        readings = [
            self._run(block, self._file, "/dev/null", "iflag=direct", expected=(self.nbytes, 0))
            for block in BLOCKS
        ]
        return min(readings, key=lambda moved: moved.seconds)

    def copy(self) -> Moved:
        """The file, to a new one."""
        return min((self._copied(block) for block in BLOCKS), key=lambda moved: moved.seconds)

    def _write(self, block: int, fsync: bool) -> Moved:
        self._file.unlink(missing_ok=True)
        removed_from(self._file.parent)
        flags = ["oflag=direct", *(["conv=fsync"] if fsync else [])]
        return self._run(block, "/dev/zero", self._file, *flags, expected=(0, self.nbytes))

    def _copied(self, block: int) -> Moved:
        try:
            return self._run(
                block,
                self._file,
                self._copy,
                *("iflag=direct", "oflag=direct"),
                expected=(self.nbytes, self.nbytes),
            )
        finally:
            self._copy.unlink(missing_ok=True)
            removed_from(self._file.parent)

    def _run(
        self, block: int, source: Path | str, target: Path | str, *flags: str, expected: tuple[int, int]
    ) -> Moved:
        command = [
            "dd",
            f"if={source}",
            f"of={target}",
            f"bs={block}",
            f"count={self.nbytes // block}",
            *flags,
        ]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        message = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stderr.close()
        if process.returncode:
            raise DdError(f"{' '.join(command)} ended with status {process.returncode}: {message.strip()}")
        moved = (usage.ru_inblock * SECTOR, usage.ru_oublock * SECTOR)
        if any(nbytes < want for nbytes, want in zip(moved, expected, strict=True)):
            raise DdError(
                f"{' '.join(command)} read {moved[0]:,} and wrote {moved[1]:,} bytes of a disk, instead of"
                f" {expected[0]:,} and {expected[1]:,}: {source} or {target} is not on one"
            )
        return Moved(seconds, self.nbytes)
