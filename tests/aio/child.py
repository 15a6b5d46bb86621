"""What test code in a process of its own has at hand: memory, and ways to be denied what the parent may do.

Run by the fixture ``run_child``; a test's code says ``from child import ...``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from typing import NoReturn

libc = ctypes.CDLL(None, use_errno=True)

# io_uring's numbers are the same everywhere; an architecture not named here has no test.
IO_URING = {"io_uring_setup": 425, "io_uring_enter": 426}
SYSTEM_CALLS = {
    "x86_64": {"io_setup": 206, "io_destroy": 207, "pwrite64": 18, "seccomp": 317},
    "aarch64": {"io_setup": 0, "io_destroy": 1, "pwrite64": 68, "seccomp": 277},
}


class Memory:
    """Page-aligned anonymous memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))


def skip(why: str) -> NoReturn:
    print(why)
    sys.exit(77)


def number_of(call: str) -> int:
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        skip(f"the number of {call} on {machine} is not known to this test")
    return (SYSTEM_CALLS[machine] | IO_URING)[call]


def deny(**calls: int) -> None:
    """From now on these system calls, of any thread, do nothing and answer the given errno (0: they return 0)."""
    load, jump_equal, answer, allow, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    lines = [(load, 0, 0, 0)]  # the system call's number
    for call, code in calls.items():
        lines += [(jump_equal, 0, 1, number_of(call)), (answer, 0, 0, refuse | code)]
    lines.append((answer, 0, 0, allow))
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    text = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_void_p)]

    set_no_new_privs, set_mode_filter, all_threads = 38, 1, 1
    loaded = Filter(len(lines), ctypes.addressof(text))
    if libc.prctl(set_no_new_privs, 1, 0, 0, 0) or libc.syscall(
        number_of("seccomp"), set_mode_filter, all_threads, ctypes.byref(loaded)
    ):
        skip("the kernel takes no seccomp filter here")


def exhaust_aio() -> None:
    """Take all that fs.aio-max-nr leaves. The kernel gives it back when this process ends, however it does."""
    setup = number_of("io_setup")
    size = 1 << 16
    while size:
        if libc.syscall(setup, size, ctypes.byref(ctypes.c_ulong(0))):
            size //= 2
