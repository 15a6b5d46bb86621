"""Which directories may be measured, and how much of them: what is refused, what is warned of, one run at a time.

Nothing that exists is ever written to: the load has nameless files of its own. What is refused here is what would
still do harm or mislead: devices and files, which somebody may have taken for the thing to measure, memory posing as a
disk, and a file system that the run would fill. A symbolic link is followed once, before all of that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiering.config.fields import format_size
from tiering.errors import SwapSpaceError, UnsafeTargetError
from tiering.host import drives
from tiering.host.drives import Backing
from tiering.storage.swap_file import free_bytes, memory_file_system
from tiering.text import counted
from tiering.tierbench.result import Target

LINK_SHARE = 0.95  # of a drive's best link: less is told
DEFAULT_SIZE = 4 << 30  # of a file, at most
DEFAULT_SHARE = 0.1  # of what is free, at most
MOST_SHARE = 0.9  # that a run may take if it is told to

_REFUSED_KINDS = {
    stat.S_IFBLK: "a block device: writing to it would destroy what is on it; mount a file system and name a directory",
    stat.S_IFCHR: "a device; name a directory on the drive",
    stat.S_IFREG: "a file; name a directory, in which tierbench makes a private file of its own",
    stat.S_IFIFO: "a pipe; name a directory",
    stat.S_IFSOCK: "a socket; name a directory",
}


def check(directory: Path) -> Path:
    """``directory``, absolute and without symbolic links, if files may be made and measured there.

    Raises UnsafeTargetError or SwapSpaceError.
    """
    try:
        found = directory.resolve(strict=True)
        mode = found.stat().st_mode
    except OSError as error:
        raise _unreachable(directory, error) from None
    except RuntimeError:  # Python 3.11 and 3.12: links that lead to each other
        raise _unreachable(directory, OSError(errno.ELOOP, os.strerror(errno.ELOOP))) from None
    if not stat.S_ISDIR(mode):
        raise UnsafeTargetError(
            f"{directory} is {_REFUSED_KINDS.get(stat.S_IFMT(mode), 'no directory; name one')}"
        )
    try:
        str(found).encode()
    except UnicodeEncodeError:
        raise SwapSpaceError(
            f"{os.fsencode(found)!r} is not a name in UTF-8, so no configuration can have it; name another directory"
        ) from None
    if kind := memory_file_system(found):
        raise UnsafeTargetError(
            f"{directory} is on {kind}, which is memory and no drive; name a directory on the drive"
        )
    if os.statvfs(found).f_flag & os.ST_RDONLY:
        raise SwapSpaceError(
            f"{directory} is on a file system that is mounted read-only; remount it or name another"
        )
    if not os.access(found, os.W_OK | os.X_OK):
        raise SwapSpaceError(
            f"{directory} is not writable by this user; change its mode or name another directory"
        )
    return found


def _unreachable(directory: Path, error: OSError) -> SwapSpaceError:
    if error.errno == errno.ENOENT:
        # mkdir does not follow a link to what is gone.
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
    """As ``check``, for several that are used at once: each once."""
    found = tuple(check(directory) for directory in directories)
    for directory in found:
        if found.count(directory) > 1:
            raise SwapSpaceError(f"{directory} is named twice; name each directory once")
    return found


def file_size(directories: Sequence[Path], *, numjobs: int, bs: int, asked: int | None = None) -> int:
    """Bytes of each file, a multiple of ``bs``: those ``asked`` for, or what does no harm. Raises
    UnsafeTargetError if they do."""
    by_device: dict[int, list[Path]] = {}
    for directory in directories:
        by_device.setdefault(directory.stat().st_dev, []).append(directory)
    room = min(free_bytes(sharing[0]) // (len(sharing) * numjobs) for sharing in by_device.values())
    least = bs * 4
    size = min(DEFAULT_SIZE // numjobs, int(room * DEFAULT_SHARE)) if asked is None else asked
    size = max(size // bs * bs, least)
    if size > room * MOST_SHARE:
        files = len(directories) * numjobs
        raise UnsafeTargetError(
            f"{counted(files, 'file')} of {format_size(size)} would leave less than a tenth of what is"
            f" free in {', '.join(map(str, directories))} ({format_size(room)} for each); give a smaller --size, or"
            " free space"
        )
    return size


def of(directory: Path) -> Target:
    """What a result says of ``directory``, as it is now."""
    return Target(
        directory=str(directory), backing=drives.behind(directory), free_bytes=free_bytes(directory)
    )


def warnings(directory: Path, backing: Backing) -> list[str]:
    """What about a directory's file system and drives makes its figures mean less than they seem to."""
    file_system, found = backing.file_system, []
    if file_system.kind == "overlay":
        found.append("an overlay (a container's root): mount a volume of the drive and name that")
    if file_system.kind == "network":
        found.append(
            f"{file_system.type} is a network file system: figures are of the network and the server's cache"
        )
    for disk in backing.disks:
        if disk.rotational and disk.transport != "virtio":
            found.append(f"{disk.name} turns: a hard disk is no place for training state")
        if (
            disk.link
            and disk.best_link
            and disk.link.bytes_per_second < LINK_SHARE * disk.best_link.bytes_per_second
        ):
            found.append(
                f"{disk.name} is linked by {disk.link}, although it can {disk.best_link}: another slot?"
            )
    found += [
        f"{posing}: figures are of memory and of the file system below" for posing in drives.posing(backing)
    ]
    return [f"{directory}: {each}" for each in found]


@contextlib.contextmanager
def alone_in(directories: Sequence[Path]) -> Iterator[None]:
    """Hold a lock on each directory: two runs there would measure each other. UnsafeTargetError if it is held."""
    with contextlib.ExitStack() as held:
        for directory in directories:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    raise UnsafeTargetError(
                        f"another tierbench is at work in {directory}: both would measure each other; wait for it"
                    ) from None
                # Some network file systems lock no directories: a second run is not noticed there.
        yield
