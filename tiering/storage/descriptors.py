"""Files that are open in one process only: no forked child has them, and there may be thousands.

A child that is forked, as a data loader's worker is, has all of its parent's descriptors until it ends or calls exec. A
file that the parent has closed and removed would keep its space on the disk for as long.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

_OPEN: set[int] = set()


def open_alone(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of ``path`` for this process only; close it by ``close_alone``."""
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _OPEN.add(fd)
    _make_room(fd)
    return fd


def close_alone(fd: int) -> None:
    """Close ``fd``. In a forked child it is already closed."""
    if fd in _OPEN:
        _OPEN.discard(fd)
        os.close(fd)


def in_use() -> int:
    """The number of descriptors that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1  # the directory itself is one


def allow(count: int) -> int:
    """Raise the limit of open descriptors to ``count``, or to the hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    more = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if more > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
    return max(more, soft)


def _make_room(fd: int) -> None:
    """Double the soft limit (usually 1024), up to the hard limit, when half of the descriptors are in use."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and fd >= soft // 2:
        allow(2 * soft)


def _close_in_child() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_close_in_child)
