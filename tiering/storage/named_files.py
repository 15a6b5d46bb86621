"""Swap files with names: they outlive the run that snapshots (tiering/checkpoint/manifest.py) are made of.

A swap file has no name until the first snapshot, which gives it one with linkat(2): nothing is left behind without a
snapshot. Whoever has it open for writing holds its lock (flock), which the kernel releases however the process ends.
So a file whose lock is free belongs to a run that has ended: only then is it read, or removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tiering.errors import SwapSpaceError
from tiering.storage.file_system import open_regular

log = logging.getLogger(__name__)

_NAME = re.compile(r"tiering-[A-Za-z0-9_.-]+-[0-9a-f]{16}\.swap")


class NamedFile(NamedTuple):
    """A swap file with a name. The number of its device would not do: it may be another one after a restart."""

    path: Path
    inode: int
    nbytes: int

    @classmethod
    def of(cls, path: Path, fd: int) -> NamedFile:
        """The open file ``fd``, whose name is ``path``."""
        status = os.fstat(fd)
        return cls(path, status.st_ino, status.st_size)


def name_in(directory: Path, label: str) -> Path:
    """A new name in ``directory`` for a swap file of the rank that ``label`` names."""
    return directory / f"tiering-{label}-{secrets.token_hex(8)}.swap"


def link(fd: int, path: Path) -> None:
    """Lock the swap file ``fd`` and give it the name ``path``. Raises OSError."""
    # First: a file with a name and without a lock may be removed.
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _link(fd, path)


def _link(fd: int, path: Path) -> None:
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # With a directory's descriptor Python calls linkat(2), which follows the link in /proc; link(2) does not.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def check_links(directory: Path) -> None:
    """SwapSpaceError unless swap files in ``directory`` can get names, which snapshots need."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            path = name_in(directory, "probe")
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _link(fd, path)
            path.unlink()
        finally:
            os.close(fd)
    except OSError as error:
        raise SwapSpaceError(
            f"nvme_path {directory} cannot hold snapshots: its file system lacks unnamed files that get a name later,"
            f" or locks (O_TMPFILE, linkat, flock: {error.strerror}); set tiering.snapshots to false, or name a"
            " directory on ext4, XFS or btrfs"
        ) from error


@contextmanager
def locked(file: NamedFile, *, alone: bool = False) -> Iterator[None]:
    """The block has a lock of ``file``, which no run uses: readers have it together, or one process ``alone``.

    Raises OSError if the file is gone, or another one, or in use.
    """
    fd = open_locked(file, os.O_RDONLY, alone=alone)
    try:
        yield
    finally:
        os.close(fd)


class AdoptedFile:
    """The swap ``file`` of a snapshot, open and locked to be written by this process, until ``take`` or ``close``.

    Raises OSError as ``locked`` does.
    """

    def __init__(self, file: NamedFile, *, direct: bool) -> None:
        self.path = file.path
        self._fd = open_locked(file, os.O_RDWR | (os.O_DIRECT if direct else 0), alone=True)

    def take(self) -> int:
        """The descriptor, which the caller closes."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Close the descriptor, unless it was taken."""
        if self._fd >= 0:
            os.close(self.take())


def open_locked(file: NamedFile, flags: int, *, alone: bool) -> int:
    """A descriptor of ``file`` that has the lock of ``locked`` until it is closed. Raises OSError."""
    fd = open_regular(file.path, flags | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, "a process that has not ended uses it", str(file.path)) from None
        # Only now: whoever had the lock may have removed the name.
        found = NamedFile.of(file.path, fd)
        if found.inode != file.inode or found.nbytes < file.nbytes:
            raise OSError(errno.ESTALE, "it is another file than that of the snapshot", str(file.path))
        check_name(fd, file.path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_name(fd: int, path: Path) -> None:
    """OSError unless ``path`` is a name of the open file ``fd``."""
    if not path.exists() or not os.path.samestat(path.stat(), os.fstat(fd)):
        raise OSError(errno.ENOENT, "it was removed", str(path))


def remove(files: Iterable[NamedFile]) -> None:
    """Remove the ``files`` of a snapshot that was replaced. One that is in use, or is another file by now, stays."""
    for file in files:
        if not _NAME.fullmatch(file.path.name):
            log.warning("%s is not removed: its name is not that of a swap file", file.path)
            continue
        try:
            with locked(file, alone=True):
                file.path.unlink()
        except FileNotFoundError:
            # A crash has cut off this removal before, or the snapshot before it had replaced the same files.
            continue
        except OSError as error:
            log.warning("swap file %s of a replaced snapshot is not removed: %s", file.path, error.strerror)
