"""Memory of NaN: the content of a resharded group's storage, if torch cannot refuse reads of it.

A view of a parameter may be kept after its group was resharded (a user's hook keeps ``weight.detach()``). A read of the
view must neither end the process nor return zeros, which look like values. So the storage always has an address: one
small block of NaN, mapped repeatedly over as much address space as the largest group takes. Writes go to private copies
of its pages.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import weakref

log = logging.getLogger(__name__)

BLOCK = 2 << 20  # bytes of memory that are mapped repeatedly
MAPPINGS = 1 << 14  # maximum number of mappings; Linux permits 65530 per process by default

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value


def map_nan(nbytes: int) -> memoryview | None:
    """``nbytes`` of address space that read as 0xFF, a NaN in every floating-point dtype; None if it cannot be mapped.

    The range is unmapped when no object refers to it any more.
    """
    block = max(BLOCK, -(-nbytes // MAPPINGS // BLOCK) * BLOCK)
    size = -(-max(nbytes, 1) // block) * block
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    private = mmap.MAP_PRIVATE | _MAP_NORESERVE
    base = libc.mmap(None, size, protection, private | mmap.MAP_ANONYMOUS, -1, 0)
    if base == _FAILED:
        log.debug("cannot reserve %d bytes of address space: %s", size, os.strerror(ctypes.get_errno()))
        return None
    region = (ctypes.c_char * size).from_address(base)
    # Before the mappings below, so that a return without them also unmaps the whole range. Not at exit: tensors may
    # still show these bytes then.
    weakref.finalize(region, libc.munmap, base, size).atexit = False
    content = os.memfd_create("nan", os.MFD_CLOEXEC)
    try:
        if os.write(content, b"\xff" * block) < block:
            return None
        # MAP_FIXED replaces pages of the range that was reserved above, and of no other mapping.
        for offset in range(0, size, block):
            if libc.mmap(base + offset, block, protection, private | _MAP_FIXED, content, 0) == _FAILED:
                log.debug("cannot map memory of NaN: %s", os.strerror(ctypes.get_errno()))
                return None
    finally:
        # The mappings keep the memory of the file.
        os.close(content)
    # The view refers to ``region``: the range is unmapped when no tensor shows it any more.
    return memoryview(region).cast("B")[:nbytes]
