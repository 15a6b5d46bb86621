"""Disk quotas of this process, from the kernel (quotactl_fd, Linux 5.14)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The same number on all architectures.
_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
# linux/quota.h, by the kind of the owner.
_KINDS: dict[Literal["user", "group"], int] = {"user": 0, "group": 1}
_BLOCK = 1024  # bytes


class _Quota(ctypes.Structure):
    _fields_ = (
        ("hard_blocks", ctypes.c_uint64),
        ("soft_blocks", ctypes.c_uint64),
        ("used_bytes", ctypes.c_uint64),
        ("hard_inodes", ctypes.c_uint64),
        ("soft_inodes", ctypes.c_uint64),
        ("used_inodes", ctypes.c_uint64),
        ("blocks_until", ctypes.c_uint64),
        ("inodes_until", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Quota:
    """A limit in bytes on what a user or a group may have on a file system, and the bytes that it has."""

    kind: Literal["user", "group"]
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def quotas(directory: Path) -> Iterator[Quota]:
    """The quotas of this user and group on the file system of ``directory``; none where there is no limit.

    The hard limit counts, or the soft one if there is no other. Raises OSError if ``directory`` cannot be opened.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for kind, number in _KINDS.items():
            owner = os.geteuid() if kind == "user" else os.getegid()
            quota = _Quota()
            command = ctypes.c_int(_GET_QUOTA << 8 | number)
            # An error means that the file system has no quotas, or that the kernel is older.
            if libc.syscall(_QUOTACTL_FD, fd, command, owner, ctypes.byref(quota)) == 0:
                limit = quota.hard_blocks or quota.soft_blocks
                if limit:
                    yield Quota(kind, limit * _BLOCK, quota.used_bytes)
    finally:
        os.close(fd)
