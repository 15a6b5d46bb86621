"""Mappings of host memory: kept in RAM, and from forked children."""

from __future__ import annotations

import functools
import mmap
import operator
import os
import weakref

from tiering._aio import ffi, lib


def keeping(memory: memoryview, owner: object) -> memoryview:
    """``memory``, in a view that keeps ``owner`` alive."""
    # A destructor that does nothing, in C: what a signal handler raises in one of Python, the interpreter throws away.
    pointer = ffi.gc(ffi.from_buffer(memory), functools.partial(operator.is_, owner))
    return memoryview(ffi.buffer(pointer, len(memory)))


def lock_memory(address: int, nbytes: int) -> int:
    """Keep a range of memory in RAM (mlock), best effort: 0, or the errno of the refusal (ENOMEM: RLIMIT_MEMLOCK)."""
    return -int(lib.aio_lock_memory(ffi.cast("void *", address), nbytes))


def withhold(mapping: mmap.mmap, address: int) -> None:
    """Keep a private mapping, which begins at ``address``, from forked children, until it goes.

    There it can be neither read nor written, and its addresses stay taken: the child's copy of ``mapping`` unmaps
    nothing but itself. Raises OSError if the system refuses.
    """
    out = ffi.new("aio_withheld **")
    code = lib.aio_withhold(out, ffi.cast("void *", address), len(mapping))
    if code < 0:
        raise OSError(-code, f"memory cannot be kept from forked children: {os.strerror(-code)}")
    weakref.finalize(mapping, lib.aio_forget_withheld, out[0]).atexit = False
