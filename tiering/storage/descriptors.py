"""Files that a process keeps open for itself: no child has them, and there is room for thousands.

A child that is forked, as a data loader's worker is, has all of its parent's descriptors until it ends or calls exec. A
file that the parent has closed and removed would keep its space on the disk for as long.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_OPEN: set[int] = set()


def open_alone(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of ``path`` for this process alone, to be given to ``close_alone``."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _OPEN.add(fd)
    _make_room(fd)
    return fd


def close_alone(fd: int) -> None:
    """Close it. In a child that was forked meanwhile it is closed already."""
    if fd in _OPEN:
        _OPEN.discard(fd)
        os.close(fd)


def in_use() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # the directory itself is one


def allow(count: int) -> int:
    """Let this process have ``count`` descriptors open, or as many as it may: returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    more = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if more > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return max(more, soft)


def _make_room(fd: int) -> None:
    """Half of the numbers are in use: allow twice as many, where the process may (the usual soft limit is 1024)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and fd >= soft // 2:
        allow(2 * soft)


def _close_in_child() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_close_in_child)
