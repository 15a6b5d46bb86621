"""Returns freed memory to the system. The C library would keep free blocks between blocks that are in use."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

# A function of glibc; other C libraries return memory by themselves.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

LOOKS = 8
"""Looks at the process while as many bytes are freed as it may have in excess."""


def trim() -> None:
    """Return the freed memory of this process to the system. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class FreedMemory:
    """Returns freed memory to the system once the process has ``most`` bytes more than it needs.

    What it needs is the most that it had left after memory was returned. A return takes milliseconds, and its pages
    have to be zeroed for the next tensors, so it is worth a look at the process first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._needed = 0
        self._freed = 0

    def note(self, nbytes: int) -> None:
        """``nbytes`` of tensors were, or will be, freed."""
        self._freed += nbytes
        if self._freed < self._most // LOOKS:
            return
        self._freed = 0
        if _resident() > self._needed + self._most:
            trim()
            self._needed = max(self._needed, _resident())


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
