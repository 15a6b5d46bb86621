"""The writer of a status file: a rank owns the file and its lock until it closes them."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
import weakref
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tiering.errors import TelemetryError
from tiering.telemetry.description import Description
from tiering.telemetry.run_directories import (
    RETENTION_SECONDS,
    SUFFIX,
    UNFINISHED,
    plain_name,
    private_directory,
    run_directory,
    sweep,
)
from tiering.telemetry.snapshot import Snapshot
from tiering.telemetry.status_file import (
    CAPACITY,
    HEADER,
    LARGEST_DESCRIPTION,
    MAGIC,
    SEQUENCE,
    SEQUENCE_OFFSET,
    VERSION,
    Header,
    checksum,
)
from tiering.telemetry.step_record import RECENT_STEPS

log = logging.getLogger(__name__)

_inherited: weakref.WeakSet[StatusWriter] = weakref.WeakSet()
# Held while a status file is created, and during a fork: a child must not inherit the lock of a file that is not yet
# in _inherited, because it would not close it.
_forking = threading.RLock()


class StatusWriter:
    """The status file of one rank. Creating it removes old files of dead writers; closing it removes its own.

    ``publish`` may be called from any thread. In a forked child the writer is closed and publishes nothing.
    A ``description`` larger than LARGEST_DESCRIPTION loses settings. With ``owns_directory``, the removal of the last
    status file also removes the directory. Raises TelemetryError if the file cannot be created.
    """

    path: Path

    def __init__(
        self,
        run_name: str,
        rank: int = 0,
        world_size: int = 1,
        directory: Path | None = None,
        description: Description | None = None,
        *,
        owns_directory: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        directory = private_directory(run_directory() if directory is None else Path(directory))
        # If the directory cannot be used, _create() raises the error.
        with suppress(OSError):
            sweep(directory, RETENTION_SECONDS)
        self._description = b"" if description is None else description.fitted(LARGEST_DESCRIPTION).encode()
        if len(self._description) > LARGEST_DESCRIPTION:
            raise TelemetryError(
                f"the description of run {run_name!r} takes {len(self._description)} bytes without its settings;"
                f" a status file holds {LARGEST_DESCRIPTION}"
            )
        name = f"{plain_name(run_name)}.{rank}.{os.getpid()}-{secrets.token_hex(4)}"
        self.path = directory / (name + SUFFIX)
        self._owns_directory = owns_directory
        # Guards _fd, _sequence and the content of the file.
        self._lock = threading.Lock()
        self._sequence = 0
        with _forking:
            self._fd = self._create()
            _inherited.add(self)

    def _create(self) -> int:
        fd, unfinished = -1, self.path.with_suffix(UNFINISHED)
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # A concurrent sweep may hold the shared lock for a moment while it tests this file.
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Allocate all blocks now: a full disk fails here, not during training.
            os.posix_fallocate(fd, 0, HEADER.size + CAPACITY + len(self._description))
            os.pwrite(fd, self._description, HEADER.size + CAPACITY)
            # After everything that it describes, and before the name: readers see a complete file.
            os.pwrite(fd, self._header(0, b"").pack(), 0)
            # After the lock: a file with this name and without a lock counts as that of a dead writer, and is removed.
            unfinished.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
            raise TelemetryError(
                f"status file {self.path} cannot be created: {error.strerror}; "
                "free space there, or set TIERING_RUN_DIR"
            ) from error
        return fd

    def _header(self, heartbeat_ns: int, payload: bytes) -> Header:
        return Header(
            MAGIC,
            VERSION,
            HEADER.size,
            CAPACITY,
            self._sequence,
            heartbeat_ns,
            len(payload),
            checksum(heartbeat_ns, payload),
            zlib.crc32(self._description),
            len(self._description),
        )

    def _recreate(self) -> None:
        """Create a removed file again, with its directory if necessary: no reader sees writes to a removed file."""
        private_directory(self.path.parent)
        with _forking:
            # Under the lock of forks: a child closes exactly the descriptor that is in ``_fd``.
            removed_fd, self._fd = self._fd, self._create()
            os.close(removed_fd)
        log.info("status file %s had been removed and was created again", self.path)

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the file's content. Creates a removed file and its directory again.

        Raises TelemetryError if the snapshot does not fit or the file cannot be created, OSError if a write fails,
        ValueError after ``close``.
        """
        payload = _fitted(snapshot)
        with self._lock:
            if self._fd == _ABANDONED:
                return
            if self._fd < 0:
                raise ValueError(f"publish on the closed status file {self.path}")
            if not os.fstat(self._fd).st_nlink:
                self._recreate()
            # Odd also if an exception interrupted the previous update, which left an odd number.
            self._sequence = (self._sequence + 1) | 1
            # 1. Odd: whoever reads from here on repeats the read.
            os.pwrite(self._fd, SEQUENCE.pack(self._sequence), SEQUENCE_OFFSET)
            # 2. The payload, which may now be mixed with the old one.
            os.pwrite(self._fd, payload, HEADER.size)
            # 3. Even again, in one write with the length and the checksum of the payload.
            self._sequence += 1
            os.pwrite(self._fd, self._header(time.time_ns(), payload).pack(), 0)

    def close(self) -> None:
        """Remove the file and release its lock. Idempotent."""
        self._end(keep=False)

    def leave(self) -> None:
        """Release the lock. The file stays readable until a sweep; in a directory of its own it is removed."""
        self._end(keep=not self._owns_directory)

    def _end(self, *, keep: bool) -> None:
        with self._lock:
            if self._fd < 0:
                return
            # An error here must not fail training at its end: a file that stays has no lock, and a sweep removes it.
            with suppress(OSError):
                # While the lock is held: otherwise readers would report the writer as dead before the file is gone.
                if not keep:
                    self.path.unlink()
                if self._owns_directory:
                    self.path.parent.rmdir()
            # In this order: a child that is forked between the two statements closes nothing. In the other order, it
            # could close a descriptor that another thread has opened with the same number.
            fd, self._fd = self._fd, _CLOSED
            os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: close the inherited descriptor; file and lock stay with the parent."""
        # Another thread of the parent may have held the old lock during the fork.
        self._lock = threading.Lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = _ABANDONED


_CLOSED, _ABANDONED = -1, -2


def _abandon_inherited() -> None:
    # Acquired before the fork by the thread that this one is a copy of.
    _forking.release()
    for writer in list(_inherited):
        writer._abandon()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_abandon_inherited
)


def _fitted(snapshot: Snapshot) -> bytes:
    """The payload, with as many of the recent steps as CAPACITY allows."""
    steps = snapshot.steps[-RECENT_STEPS:]
    while True:
        payload = replace(snapshot, steps=steps).to_json().encode()
        if len(payload) <= CAPACITY:
            return payload
        if not steps:
            raise TelemetryError(
                f"the snapshot of run {snapshot.run_name!r} takes {len(payload)} bytes without its steps; "
                f"a status file holds {CAPACITY}"
            )
        steps = steps[(len(steps) + 1) // 2 :]
