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


def _make_room(fd: int) -> None:
    """Half of the numbers are in use: allow twice as many, where the process may (the usual soft limit is 1024)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or fd < soft // 2 or soft == hard:
        return
    more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))


def _close_in_child() -> None:
    while _OPEN:
        os.close(_OPEN.pop())


os.register_at_fork(after_in_child=_close_in_child)
