"""Checks of the directories to measure: refusals, warnings, file sizes, and a lock for one run at a time.

A load never writes to existing files; it has its own unnamed files. The checks refuse targets that would still do harm
or mislead: devices and files, which a user may give instead of a directory, file systems in memory, and files that
would fill the file system. A symbolic link is resolved once, before the checks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering._text import counted
from tiering.config.fields import format_size
from tiering.errors import SwapSpaceError, UnsafeTargetError
from tiering.host import drives
from tiering.host.drives import Backing
from tiering.storage.swap_file import free_bytes, memory_file_system
from tiering.tierbench.result import Target

LINK_SHARE = 0.95  # of a drive's best link; a warning reports a slower link
DEFAULT_SIZE = 4 << 30  # largest default size of a file
DEFAULT_SHARE = 0.1  # of the free space, the most that a run takes by default
MAX_SHARE = 0.9  # of the free space, the most that --size may take

_REFUSED_KINDS = {
    stat.S_IFBLK: "a block device: writing to it would destroy what is on it; mount a file system and name a directory",
    stat.S_IFCHR: "a device; name a directory on the drive",
    stat.S_IFREG: "a file; name a directory, in which tierbench creates its own private file",
    stat.S_IFIFO: "a pipe; name a directory",
    stat.S_IFSOCK: "a socket; name a directory",
}


def check(directory: Path) -> Path:
    """``directory`` as an absolute path without symbolic links, if it is safe to measure.

    Raises UnsafeTargetError or SwapSpaceError.
    """
    try:
        resolved = directory.resolve(strict=True)
        mode = resolved.stat().st_mode
    except OSError as error:
        raise _unreachable(directory, error) from None
    except RuntimeError:  # Python 3.11 and 3.12: links that lead to each other
        raise _unreachable(directory, OSError(errno.ELOOP, os.strerror(errno.ELOOP))) from None
    if not stat.S_ISDIR(mode):
        raise UnsafeTargetError(
            f"{directory} is {_REFUSED_KINDS.get(stat.S_IFMT(mode), 'not a directory; name a directory')}"
        )
    try:
        str(resolved).encode()
    except UnicodeEncodeError:
        raise SwapSpaceError(
            f"{os.fsencode(resolved)!r} is not valid UTF-8, so no configuration can contain it; name another directory"
        ) from None
    if kind := memory_file_system(resolved):
        raise UnsafeTargetError(
            f"{directory} is on {kind}, which is memory and not a drive; name a directory on the drive"
        )
    if os.statvfs(resolved).f_flag & os.ST_RDONLY:
        raise SwapSpaceError(
            f"{directory} is on a file system that is mounted read-only; remount it or name another"
        )
    if not os.access(resolved, os.W_OK | os.X_OK):
        raise SwapSpaceError(
            f"{directory} is not writable by this user; change its mode or name another directory"
        )
    return resolved


def _unreachable(directory: Path, error: OSError) -> SwapSpaceError:
    if error.errno == errno.ENOENT:
        # mkdir does not follow a dangling link, so the remedy names its target.
        missing = directory.resolve() if directory.is_symlink() else directory
        remedy = f"create it (mkdir -p {missing})"
    elif error.errno == errno.ELOOP:
        remedy = "remove the symbolic links that lead to each other"
    else:
        remedy = "change its mode"
    return SwapSpaceError(
        f"{directory} cannot be reached: {error.strerror}; {remedy}, or name another directory"
    )


def check_all(directories: Sequence[Path]) -> tuple[Path, ...]:
    """``check`` for several directories that are used at once. Raises SwapSpaceError if one is named twice."""
    resolved = tuple(check(directory) for directory in directories)
    for directory in resolved:
        if resolved.count(directory) > 1:
            raise SwapSpaceError(f"{directory} is named twice; name each directory once")
    return resolved


def file_size(directories: Sequence[Path], *, numjobs: int, bs: int, requested: int | None = None) -> int:
    """Bytes of each file, a multiple of ``bs``: ``requested``, or a default that leaves 90 % of the free space.

    Raises UnsafeTargetError if the files would leave less than a tenth of the free space.
    """
    by_device: dict[int, list[Path]] = {}
    for directory in directories:
        by_device.setdefault(directory.stat().st_dev, []).append(directory)
    room = min(free_bytes(sharing[0]) // (len(sharing) * numjobs) for sharing in by_device.values())
    smallest = bs * 4
    size = min(DEFAULT_SIZE // numjobs, int(room * DEFAULT_SHARE)) if requested is None else requested
    size = max(size // bs * bs, smallest)
    if size > room * MAX_SHARE:
        files = len(directories) * numjobs
        raise UnsafeTargetError(
            f"{counted(files, 'file')} of {format_size(size)} would leave less than a tenth of the free space"
            f" in {', '.join(map(str, directories))} ({format_size(room)} for each); give a smaller --size, or"
            " free space"
        )
    return size


def describe(directory: Path) -> Target:
    """The ``Target`` of a result for ``directory``, in its present state."""
    return Target(
        directory=str(directory), backing=drives.behind(directory), free_bytes=free_bytes(directory)
    )


def warnings(directory: Path, backing: Backing) -> list[str]:
    """Notes about a directory's file system and drives that limit the meaning of its figures."""
    file_system, notes = backing.file_system, []
    if file_system.kind == "overlay":
        notes.append("an overlay file system (a container's root): mount a volume of the drive and name that")
    if file_system.kind == "network":
        notes.append(
            f"{file_system.type} is a network file system: the figures include the network and the server's cache"
        )
    for disk in backing.disks:
        if disk.rotational and disk.transport != "virtio":
            notes.append(f"{disk.name} is a hard disk, which is too slow for training state")
        if (
            disk.link
            and disk.best_link
            and disk.link.bytes_per_second < LINK_SHARE * disk.best_link.bytes_per_second
        ):
            notes.append(
                f"{disk.name} is connected by {disk.link}, but supports {disk.best_link}; try another slot"
            )
    notes += [
        f"{posing}: the figures are those of memory and of the file system below it"
        for posing in drives.posing(backing)
    ]
    return [f"{directory}: {each}" for each in notes]


@contextlib.contextmanager
def alone_in(directories: Sequence[Path]) -> Iterator[None]:
    """Lock each directory within the block, so that two runs do not share a drive.

    Raises UnsafeTargetError if another run holds a lock.
    """
    with contextlib.ExitStack() as locks:
        for directory in directories:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            locks.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    raise UnsafeTargetError(
                        f"another tierbench is running in {directory}, and two runs would distort each other; wait"
                        " until it ends"
                    ) from None
                # Some network file systems cannot lock directories; a second run is not detected there.
        yield
