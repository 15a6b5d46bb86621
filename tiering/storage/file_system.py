"""Calls of the file system for saved files: opening, versions, replacing, syncing, and the remedies of their errors."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tiering._remedies import FEWER_CHECKPOINTS
from tiering.errors import WeightsError
from tiering.storage.descriptors import close_alone, open_alone

log = logging.getLogger(__name__)

# Constants of <linux/fs.h>.
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

_MAY_NOT = "save to a writable directory, or change the mode of this one"
_ANOTHER = "another file has that name: save elsewhere, or move it"
_REMEDIES = {
    errno.ENOSPC: f"make room there, {FEWER_CHECKPOINTS}, or save elsewhere",
    errno.EDQUOT: f"raise the quota, make room there, {FEWER_CHECKPOINTS}, or save elsewhere",
    errno.EFBIG: "the file would pass the process's file size limit: raise it with `ulimit -f`",
    errno.EMFILE: "raise the limit of open files with `ulimit -n`",
    errno.EEXIST: "another process writes there: use one directory per run",
    errno.ENOENT: "its directory was removed",
    errno.EIO: "the disk failed, see dmesg; save to another one",
    errno.EACCES: _MAY_NOT,
    errno.EPERM: _MAY_NOT,
    errno.EROFS: "the file system is mounted read-only: save elsewhere, or remount it",
    errno.ENOTDIR: _ANOTHER,
    errno.EISDIR: _ANOTHER,
    errno.ENOTEMPTY: _ANOTHER,
}


@dataclass(frozen=True, slots=True)
class FileVersion:
    """Identifies the content of a file, to detect changes after its header was read."""

    device: int
    inode: int
    nbytes: int
    # None: the time does not matter, because a lock keeps others from writing where it is read.
    modified_ns: int | None

    @classmethod
    def of(cls, fd: int) -> Self:
        """The version of an open file."""
        status = os.fstat(fd)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def is_of(self, fd: int) -> bool:
        """Whether the open file ``fd`` has it."""
        found = self.of(fd)
        return self == (found if self.modified_ns is not None else replace(found, modified_ns=None))


def remedy(code: int) -> str:
    """The remedy if a save fails with the error number ``code``."""
    return _REMEDIES.get(code, "see dmesg, and save elsewhere")


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a file in a directory to which others may write. Raises OSError if it is not a regular file.

    The call never waits for the other end of a pipe. ``os.O_NOFOLLOW`` also refuses a symbolic link.
    """
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def open_for_reading(path: Path) -> tuple[int, bool]:
    """A descriptor of this process alone (descriptors.py), and whether it bypasses the page cache.

    Raises WeightsError if the file cannot be opened.
    """
    try:
        fd = _open_direct(path)
        if fd >= 0:
            return fd, True
        log.warning("the file system of %s refuses O_DIRECT: reading it fills the page cache", path)
        return open_alone(path, os.O_RDONLY | os.O_NONBLOCK), False
    except OSError as error:
        raise unopened(path, error) from error


def _open_direct(path: Path) -> int:
    """A descriptor with O_DIRECT, or -1. It tries a read, because some file systems refuse only the transfer."""
    fd = -1
    try:
        fd = open_alone(path, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK)
        with mmap.mmap(-1, direct_alignment(fd)) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        if fd >= 0:
            close_alone(fd)
        if error.errno != errno.EINVAL:
            raise
        return -1
    return fd


def direct_alignment(fd: int) -> int:
    """The bytes of which operations on a file with O_DIRECT transfer multiples: a page or, on some devices, more.

    The I/O context merges pieces of larger blocks. A page, too, where the kernel does not say it.
    """
    # Here, because the header of a file is read without the I/O library.
    from tiering._aio import lib

    return max(int(lib.AIO_ALIGNMENT), int(lib.aio_direct_alignment(fd)))


def unopened(path: Path, error: OSError) -> WeightsError:
    """The error for a ``path`` that could not be opened because of ``error``."""
    if error.errno != errno.ENOENT:
        too_many = error.errno in (errno.EMFILE, errno.ENFILE)
        remedy = "raise the limit with ulimit -n" if too_many else "change its mode or name another file"
        return WeightsError(f"{path}: it cannot be opened: {error.strerror}", remedy)
    if path.is_symlink():
        return WeightsError(
            f"{path}: it is a symbolic link to a file that does not exist", "download it again"
        )
    return WeightsError(f"{path}: it does not exist", "name a .safetensors file or a directory with one")


def fsync(path: Path) -> None:
    """Wait until ``path`` is on the disk: a file's bytes, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not let callers sync directories
            raise
    finally:
        os.close(fd)


def replace_content(path: Path, content: bytes) -> None:
    """Replace the content of the existing file at ``path`` atomically; its mode stays. Raises OSError.

    A symbolic link stays, and the file that it points to is replaced.
    """
    target = path.resolve()
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    partial = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            os.fsync(fd)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def create_durably(path: Path) -> None:
    """Creates ``path`` and its missing parents, and fsyncs each parent."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        # The name of a directory is an entry of its parent.
        fsync(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory")


def exchange(first: Path, second: Path) -> None:
    """Exchanges two names atomically with renameat2(2), which Python does not have."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        # glibc before 2.28 does not have renameat2.
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))
