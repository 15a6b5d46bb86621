"""The lock of a checkpoint directory: one run saves there at a time.

``flock`` belongs to the open file. So two engines of one process exclude each other as two processes do, and the kernel
takes it back however its holder ends. The file stays; its text says who held it last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from tiering.errors import CheckpointError

log = logging.getLogger(__name__)

LOCK = ".lock"

_NO_LOCKS = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOLCK,
)  # Lustre without -o flock, NFS without a lock server

_TAKEN: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """The lock of ``directory``. ``alone`` says that no other run can have it, too: some file systems know no locks."""

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        self.directory = directory
        self.alone = False

    @property
    def held(self) -> bool:
        """Whether we hold the lock that others would find, and not that of a directory which was removed."""
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), (self.directory / LOCK).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def take(self) -> None:
        """CheckpointError when another run has it, OSError when the directory cannot hold one."""
        self.give_back()
        _TAKEN.add(self)
        self._fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self.alone = self._flock()
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise
        with contextlib.suppress(
            OSError
        ):  # to say who has it is a courtesy: a full disk must not get in the way
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def give_back(self) -> None:
        """Let others have it; does nothing when it is not held."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(
                    self._fd, fcntl.LOCK_UN
                )  # to close alone would leave it to a child that has not exec'ed yet
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _flock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 300, 0).decode(errors="replace").strip()
            raise CheckpointError(
                f"another run saves to {self.directory}: {holder if holder and holder.isprintable() else 'unknown'};"
                " let it end, close the engine that holds it, or save to another directory"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "the file system of %s has no locks (%s): two runs that save there are not told apart, and what"
                " crashed saves leave (.*.partial-*) stays",
                self.directory,
                error.strerror,
            )
            return False
        return True


def _close_in_child() -> None:
    """Or a child would hold the lock after its parent's death. It only closes: to unlock would unlock the parent."""
    for lock in list(_TAKEN):
        if lock._fd >= 0:
            os.close(lock._fd)
            lock._fd = -1


os.register_at_fork(after_in_child=_close_in_child)
