"""The lock of a checkpoint directory, and the checkpoints that its holder may replace. One run saves there at a time.

``flock`` belongs to the open file, and the kernel releases it however the process ends. Of two processes, the second is
refused until the first releases the lock or ends. Of two engines of one process, the second takes the lock over, unless
the first has a save under way: a notebook or a trainer creates engines repeatedly, and an old engine that was never
closed must not block a new one.

The text of the file names the last holder. ``release`` removes the file while it still has the lock; so after locking,
``acquire`` checks that the name still leads to the same file.

A script that is run again saves under the tags of its last run. While a run has the lock, no other process saves there;
so a checkpoint of another run is one of a run that has ended, or of another engine of this process. Two engines of one
script that save under the same tag would lose each other's checkpoints: the engine that was there when the other one
saved is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from tiering.checkpoint.manifest import MANIFEST, run_of
from tiering.errors import CheckpointError
from tiering.storage.file_system import open_regular

log = logging.getLogger(__name__)

LOCK = ".lock"

# These come from Lustre without -o flock and from NFS without a lock server.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

# The text of the file starts with this.
_HOLDER = b"process "

_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()
# Guards _LOCKS, and `_fd` and `_in_use` of all locks in it.
_handover = threading.RLock()

_REMEDY = "choose another tag, save to another directory, resume from it with load_checkpoint, or remove it"

# When this process has stored a checkpoint, and when the run began that did, by its path, in seconds of
# ``time.monotonic()``.
_stored_at: dict[Path, tuple[float, float]] = {}


class RunLock:
    """The lock of ``directory``. Thread-safe.

    ``exclusive`` is False on a file system without locks, where two runs can have the lock at once.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = -1
        # True during a save: no other engine may take the lock over.
        self._in_use = False
        self.directory = directory
        self.exclusive = False

    @property
    def is_held(self) -> bool:
        """Whether this object has the lock of the current file, not of a file that was removed."""
        return self._fd >= 0 and self._is_current(self._fd)

    def acquire(self) -> bool:
        """Acquires the lock for a save, until ``end_save``; returns whether it was not held before.

        Raises CheckpointError if another run has it, OSError if the directory cannot have a lock file.
        """
        with _handover:
            new = not self.is_held
            if new:
                self._close()
                self._open()
            # Under the same lock as the check: in between, another engine could take the lock over.
            self._in_use = True
        return new

    def end_save(self) -> None:
        """Marks that no save is under way: another engine of this process may take the lock over."""
        # One assignment, without the lock: an engine that reads the old value is refused once more.
        self._in_use = False

    def release(self) -> None:
        """Releases the lock and removes its file; does nothing if the lock is not held."""
        with _handover:
            self._in_use = False
            if self._fd >= 0 and self.exclusive and self.is_held:
                # A file that stays is harmless.
                with contextlib.suppress(OSError):
                    (self.directory / LOCK).unlink()
            self._close()

    def _open(self) -> None:
        _LOCKS.add(self)
        while self._fd < 0:
            fd = self._open_file()
            try:
                holder = self._flock(fd)
                # The former holder may have removed the file after this process opened it: open the new file.
                if holder is None and self._is_current(fd):
                    self._fd, fd = fd, -1
                elif holder is not None:
                    self._take_over(holder)
            finally:
                if fd >= 0:
                    os.close(fd)
        # The holder's name only serves error messages, so a full disk must not fail the save.
        with contextlib.suppress(OSError):
            # Keep the content of a file that another program wrote.
            if os.pread(self._fd, len(_HOLDER), 0) in (b"", _HOLDER):
                os.truncate(self._fd, 0)
                os.pwrite(self._fd, _HOLDER + f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _open_file(self) -> int:
        """Opens the lock file. A symbolic link is refused, because its target would be overwritten."""
        path = self.directory / LOCK
        try:
            return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
                raise
            raise CheckpointError(
                f"{path} is not a regular file, but the lock file of the checkpoint directory must be one; remove it,"
                " or save to another directory"
            ) from error

    def _is_current(self, fd: int) -> bool:
        """Whether the open file ``fd`` is still the one with the name of the lock file."""
        try:
            return os.path.samestat(os.fstat(fd), (self.directory / LOCK).lstat())
        except OSError:
            return False

    def _take_over(self, holder: str) -> None:
        """Takes the lock over from another engine of this process, unless that has a save under way.

        Raises CheckpointError, which names the ``holder``, if another process has the lock.
        """
        for lock in list(_LOCKS):
            if lock._fd < 0 or not self._is_current(lock._fd):
                continue
            if lock._in_use:
                raise CheckpointError(
                    f"another engine of this process is saving to {self.directory}; wait for its save with wait() or"
                    " close(), or save to another directory"
                )
            log.info("took the lock of %s over from another engine of this process", self.directory)
            # The lock goes with the open file: the other object loses both at once.
            self._fd, lock._fd, self.exclusive = lock._fd, -1, lock.exclusive
            return
        raise CheckpointError(
            f"another run has locked {self.directory}: {holder}; wait until it ends, close its engine, or save to"
            " another directory"
        )

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                # Closing alone would leave the lock with a child process that has not called exec yet.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _flock(self, fd: int) -> str | None:
        """Locks ``fd``; returns the holder if another open file has the lock."""
        self.exclusive = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
            return holder if holder and holder.isprintable() else "unknown"
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.exclusive = False
            log.warning(
                "the file system of %s has no locks (%s): two runs that save there are not detected, and the remains"
                " of crashed saves (.*.partial-*) are not removed",
                self.directory,
                error.strerror,
            )
        return None


class Ownership:
    """The checkpoints that a run may replace, which began at ``began``, in seconds of ``time.monotonic()``."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._has_warned = False

    def replaces(self, place: Path, run: str, *, exclusive: bool) -> bool:
        """Whether a save of ``run`` to ``place`` replaces a checkpoint; it logs a warning for the first of another run.

        ``exclusive`` is whether the directory is locked. Raises CheckpointError if ``place`` must not be replaced.
        """
        if not os.path.lexists(place):
            return False
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, which a save does not replace; choose another tag"
            )
        if not (place / MANIFEST).is_file():
            raise CheckpointError(
                f"{place} is not a checkpoint (it has no {MANIFEST}) and is not replaced; choose another tag"
            )
        saved_by = run_of(place)
        if saved_by is None:
            raise CheckpointError(
                f"{place} is not a valid checkpoint (its {MANIFEST} is damaged or of another program) and is not"
                " replaced; choose another tag, or remove it"
            )
        if saved_by != run:
            self._check_ended(place, exclusive=exclusive)
        return True

    def note_stored(self, place: Path) -> None:
        """This run has stored the checkpoint ``place``."""
        _stored_at[place] = time.monotonic(), self._began

    def _check_ended(self, place: Path, *, exclusive: bool) -> None:
        """Raises CheckpointError if the other run that has saved ``place`` may not have ended."""
        if not exclusive:
            raise CheckpointError(
                f"{place} is a checkpoint of another run and is not replaced: the file system has no locks that would"
                f" show whether that run has ended; {_REMEDY}"
            )
        stored_at, began = _stored_at.get(place, (-math.inf, -math.inf))
        # Its own may have another id: it has loaded a checkpoint of another run since.
        if stored_at > self._began != began:
            raise CheckpointError(
                f"{place} is a checkpoint of another engine of this process, which has saved it since this engine was"
                f" made, and is not replaced; {_REMEDY}"
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s is a checkpoint of an earlier run, and is replaced, as are others that this run saves under their"
                " tags. To continue that run, call load_checkpoint; to keep its checkpoints, save to another directory",
                place,
            )


def _close_in_child() -> None:
    """Closes the descriptors in a forked child, which would otherwise keep the lock after the parent ends.

    It does not unlock, because that would unlock the parent's lock.
    """
    global _handover
    # A thread that does not exist in the child may have held the old lock.
    _handover = threading.RLock()
    for lock in list(_LOCKS):
        if lock._fd >= 0:
            os.close(lock._fd)
            lock._fd = -1


os.register_at_fork(after_in_child=_close_in_child)
