"""The writer of a page: what a rank says, on a file that is its own for as long as it lives."""

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
from tiering.telemetry.directory import (
    KEPT_SECONDS,
    SUFFIX,
    UNFINISHED,
    plain_name,
    private_directory,
    run_directory,
    sweep,
)
from tiering.telemetry.snapshot import RECENT_STEPS, Snapshot
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

log = logging.getLogger(__name__)

_inherited: weakref.WeakSet[StatusWriter] = weakref.WeakSet()
_forking = threading.RLock()  # held while a page is made: no child gets a lock that it knows nothing of


class StatusWriter:
    """One rank's page. Creating it sweeps the old pages of dead writers; closing it removes its own.

    ``publish`` may be called from any thread. In a forked child the writer is closed and publishes nothing.
    A ``description`` that takes more than a page may loses settings. With ``owns_directory`` the last page of the
    directory takes it along. Raises TelemetryError where a page cannot be.
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
        with suppress(OSError):  # whether there can be a page shows when it is made
            sweep(directory, KEPT_SECONDS)
        self._description = b"" if description is None else description.fitted(LARGEST_DESCRIPTION).encode()
        if len(self._description) > LARGEST_DESCRIPTION:
            raise TelemetryError(
                f"the description of run {run_name!r} takes {len(self._description)} bytes without its settings;"
                f" a page holds {LARGEST_DESCRIPTION}"
            )
        name = f"{plain_name(run_name)}.{rank}.{os.getpid()}-{secrets.token_hex(4)}"
        self.path = directory / (name + SUFFIX)
        self._owns_directory = owns_directory
        self._lock = threading.Lock()
        self._sequence = 0
        with _forking:
            self._fd = self._create()
            _inherited.add(self)

    def _create(self) -> int:
        fd, unfinished = -1, self.path.with_suffix(UNFINISHED)
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)  # waits for a sweep that is just asking whose it is
            # A full disk shows here, not during training.
            os.posix_fallocate(fd, 0, HEADER.size + CAPACITY + len(self._description))
            os.pwrite(fd, self._description, HEADER.size + CAPACITY)
            os.pwrite(fd, self._header(0, b"").pack(), 0)
            unfinished.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
                unfinished.unlink(missing_ok=True)
            raise TelemetryError(
                f"page {self.path} cannot be created: {error.strerror}; "
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

    def _create_anew(self) -> None:
        """A page that was removed is written on unseen: put one in its place, with its directory if need be."""
        private_directory(self.path.parent)
        with _forking:
            removed, self._fd = self._fd, self._create()
            os.close(removed)
        log.info("page %s had been removed; there is a new one", self.path)

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the page's content. A page that somebody removed is made anew, as its directory is.

        Raises TelemetryError when the snapshot does not fit, or the page cannot be made, OSError when the file system
        refuses, ValueError after ``close``.
        """
        payload = _fitted(snapshot)
        with self._lock:
            if self._fd == _ABANDONED:
                return
            if self._fd < 0:
                raise ValueError(f"publish on the closed page {self.path}")
            if not os.fstat(self._fd).st_nlink:
                self._create_anew()
            self._sequence = (self._sequence + 1) | 1  # odd also after an update that an exception ended
            os.pwrite(self._fd, SEQUENCE.pack(self._sequence), SEQUENCE_OFFSET)
            os.pwrite(self._fd, payload, HEADER.size)
            self._sequence += 1
            os.pwrite(self._fd, self._header(time.time_ns(), payload).pack(), 0)

    def close(self) -> None:
        """Remove the page and let go of its lock. Idempotent."""
        self._end(keep=False)

    def leave(self) -> None:
        """Let go of the lock. The page stays readable until it is swept; in a directory of its own it is removed."""
        self._end(keep=not self._owns_directory)

    def _end(self, *, keep: bool) -> None:
        with self._lock:
            if self._fd < 0:
                return
            # Training must not fail for its page at the end; what stays has no lock, and is swept.
            with suppress(OSError):
                if not keep:
                    self.path.unlink()
                if self._owns_directory:
                    self.path.parent.rmdir()
            # A child forked between these two finds no descriptor to close; closing first, it would find another's.
            fd, self._fd = self._fd, _CLOSED
            os.close(fd)

    def _abandon(self) -> None:
        """In a forked child: drop the shared description, leave page and lock to the parent."""
        self._lock = threading.Lock()  # the fork may have happened while another thread held the old one
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = _ABANDONED


_CLOSED, _ABANDONED = -1, -2


def _abandon_inherited() -> None:
    _forking.release()
    for one in list(_inherited):
        one._abandon()


os.register_at_fork(
    before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_abandon_inherited
)


def _fitted(snapshot: Snapshot) -> bytes:
    """The payload, with as many of the recent steps as the page can hold."""
    steps = snapshot.steps[-RECENT_STEPS:]
    while True:
        payload = replace(snapshot, steps=steps).to_json().encode()
        if len(payload) <= CAPACITY:
            return payload
        if not steps:
            raise TelemetryError(
                f"the snapshot of run {snapshot.run_name!r} takes {len(payload)} bytes without its steps; "
                f"a page holds {CAPACITY}"
            )
        steps = steps[(len(steps) + 1) // 2 :]
