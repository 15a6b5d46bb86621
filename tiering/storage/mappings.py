"""Mappings of host memory: locked into RAM, and hidden from forked children."""

from __future__ import annotations

import functools
import mmap
import operator
import os
import weakref

from tiering._aio import ffi, lib


def keeping(memory: memoryview, owner: object) -> memoryview:
    """``memory``, in a view that keeps ``owner`` alive."""
    # A destructor without effect, in C: the interpreter discards an exception of a signal handler in one of Python.
    pointer = ffi.gc(ffi.from_buffer(memory), functools.partial(operator.is_, owner))
    return memoryview(ffi.buffer(pointer, len(memory)))


def lock_memory(address: int, nbytes: int) -> int:
    """Keep a range of memory in RAM (mlock), best effort: 0, or the errno of the refusal (ENOMEM: RLIMIT_MEMLOCK)."""
    return -int(lib.aio_lock_memory(ffi.cast("void *", address), nbytes))


def withhold(mapping: mmap.mmap, address: int) -> None:
    """Hide a private mapping, which begins at ``address``, from forked children, as long as it exists.

    Children can neither read nor write it, and its addresses stay reserved: the child's copy of ``mapping`` unmaps
    only itself. Raises OSError if the system refuses.
    """
    out = ffi.new("aio_withheld **")
    code = lib.aio_withhold(out, ffi.cast("void *", address), len(mapping))
    if code < 0:
        raise OSError(-code, f"memory cannot be hidden from forked children: {os.strerror(-code)}")
    weakref.finalize(mapping, lib.aio_forget_withheld, out[0]).atexit = False
