"""Freed memory goes back to the system: the C library would keep what lies between blocks that are still in use."""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others give back by themselves


def trim() -> None:
    """Give the system what this process has freed. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
