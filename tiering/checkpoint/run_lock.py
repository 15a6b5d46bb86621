"""The lock of a checkpoint directory: one run saves there at a time.

``flock`` belongs to the open file, and the kernel takes it back however its holder ends. Of two processes the second is
refused as long as the first has the lock, which is until it gives it back or ends. Of two engines of one process the
second takes the lock over, unless the first is in the middle of a save: a notebook or a trainer makes its engine anew,
and the old one, which nobody closed, must not be in its way.

The text of the file says who held it last. Who gives the lock back removes the file, while it still has the lock; so
whoever gets a lock looks whether the file is still the one of that name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import threading
import weakref
from pathlib import Path

from tiering.errors import CheckpointError
from tiering.storage.file_system import open_regular

log = logging.getLogger(__name__)

LOCK = ".lock"

# These come from Lustre without -o flock and from NFS without a lock server.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_HOLDER = b"process "  # what the text begins with

_TAKEN: weakref.WeakSet[RunLock] = weakref.WeakSet()
_handing_over = threading.RLock()  # guards _TAKEN, and who has which descriptor and is in use


class RunLock:
    """The lock of ``directory``. ``alone`` says that no other run can have it, too: some file systems know no locks.

    Any thread may use it.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        self._in_use = False  # a save is under way: no other engine may take it over
        self.directory = directory
        self.alone = False

    @property
    def held(self) -> bool:
        """Whether we hold the lock that others would find, and not that of a directory which was removed."""
        return self._fd >= 0 and self._is_there(self._fd)

    def take(self) -> bool:
        """Hold it, and keep it until ``rest``; says whether it was not held before.

        CheckpointError when another run has it, OSError when the directory cannot hold one.
        """
        with _handing_over:
            new = not self.held
            if new:
                self._close()
                self._open()
            self._in_use = True
        return new

    def rest(self) -> None:
        """No save is under way any more: it stays ours, until another engine of this process wants it."""
        self._in_use = False

    def give_back(self) -> None:
        """Let others have it; does nothing when it is not held."""
        with _handing_over:
            self._in_use = False
            if self._fd >= 0 and self.alone and self.held:
                with contextlib.suppress(OSError):  # of no use, and no harm
                    (self.directory / LOCK).unlink()
            self._close()

    def _open(self) -> None:
        _TAKEN.add(self)
        while self._fd < 0:
            fd = self._open_file()
            try:
                holder = self._flock(fd)
                # Its holder may have removed the file after we opened it: that lock is nobody's any more.
                if holder is None and self._is_there(fd):
                    self._fd, fd = fd, -1
                elif holder is not None:
                    self._take_over(holder)
            finally:
                if fd >= 0:
                    os.close(fd)
        with contextlib.suppress(OSError):  # who has it is a courtesy: a full disk must not get in the way
            if os.pread(self._fd, len(_HOLDER), 0) in (b"", _HOLDER):  # what others have written there stays
                os.truncate(self._fd, 0)
                os.pwrite(self._fd, _HOLDER + f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _open_file(self) -> int:
        """The file of the lock. Nobody's link leads to another file, which would be written to."""
        path = self.directory / LOCK
        try:
            return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
                raise
            raise CheckpointError(
                f"{path} is not a regular file, where the lock of the checkpoint directory belongs; remove it, or save"
                " to another directory"
            ) from error

    def _is_there(self, fd: int) -> bool:
        """Whether the file that ``fd`` has open is the one that others would open."""
        try:
            return os.path.samestat(os.fstat(fd), (self.directory / LOCK).lstat())
        except OSError:
            return False

    def _take_over(self, holder: str) -> None:
        """Take the lock from an engine of this process that is not in the middle of a save.

        CheckpointError, which names the ``holder``, where somebody else has it.
        """
        for other in list(_TAKEN):
            if other._fd < 0 or not self._is_there(other._fd):
                continue
            if other._in_use:
                raise CheckpointError(
                    f"another engine of this process is saving to {self.directory}; wait for its save (wait(), or"
                    " close()), or save to another directory"
                )
            log.info("%s was saved to by another engine of this process until now", self.directory)
            self._fd, other._fd, self.alone = other._fd, -1, other.alone
            return
        raise CheckpointError(
            f"another run saves to {self.directory}: {holder}; let it end, close the engine that holds it, or save to"
            " another directory"
        )

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                # To close alone would leave the lock to a child that has not exec'ed yet.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _flock(self, fd: int) -> str | None:
        """Lock ``fd``; returns who has the lock if somebody has it already."""
        self.alone = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
            return holder if holder and holder.isprintable() else "unknown"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.alone = False
            log.warning(
                "the file system of %s has no locks (%s): two runs that save there are not told apart, and what"
                " crashed saves leave (.*.partial-*) stays",
                self.directory,
                error.strerror,
            )
        return None


def _close_in_child() -> None:
    """Or a child would hold the lock after its parent's death. It only closes: to unlock would unlock the parent."""
    global _handing_over
    _handing_over = threading.RLock()  # a thread that has not come along may have held it
    for lock in list(_TAKEN):
        if lock._fd >= 0:
            os.close(lock._fd)
            lock._fd = -1


os.register_at_fork(after_in_child=_close_in_child)
