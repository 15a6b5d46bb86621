"""Returns freed memory to the system. The C library would keep free blocks between blocks that are in use."""

from __future__ import annotations

import ctypes

# A function of glibc; other C libraries return memory by themselves.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def trim() -> None:
    """Return the freed memory of this process to the system. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
