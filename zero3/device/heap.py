"""Returns freed memory to the system. The C library would keep free blocks between blocks that are in use."""

from __future__ import annotations

import ctypes
import mmap
import os

# A function of glibc; other C libraries return memory by themselves.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

MOST = 32 << 20
"""Bytes of freed tensors that the process may keep: they are in no budget. Fewer bytes cost more time."""
MOST_OF_MOVED = 64 << 20
"""The same if activations move: each of them is freed in every pass."""


def trim() -> None:
    """Return the freed memory of this process to the system. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class FreedMemory:
    """Returns freed memory to the system once the process has ``most`` bytes more than it needs.

    What it needs is the most that it had left after memory was returned. A return takes milliseconds, and its pages
    have to be zeroed for the next tensors, so it is worth a look at the process first, which takes microseconds.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._needed = 0

    def look(self) -> None:
        """Tensors were, or will be, freed: return their memory if the process has too much of it."""
        if _malloc_trim is not None and _resident() > self._needed + self._most:
            trim()
            self._needed = max(self._needed, _resident())


def _resident() -> int:
    """Bytes of memory that this process has."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)
