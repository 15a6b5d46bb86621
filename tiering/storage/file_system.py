"""Calls of the file system for saved files: opening, replacing, syncing, and the remedies of their errors."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import tempfile
from pathlib import Path

from tiering._remedies import FEWER_CHECKPOINTS

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
