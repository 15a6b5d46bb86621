"""The status files of a run directory, and of all users of the node: the source of a Watch on one node."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from service.view import Reading
from tiering.telemetry import (
    RETENTION_SECONDS,
    StatusFile,
    StatusReading,
    TelemetryError,
    as_text,
    find_status_files,
    is_expired,
    run_directories_of_all_users,
    run_directory,
    sweep,
)

MAX_AGE = 0.25  # seconds; ranks publish no more often
SWEEP_INTERVAL = 1.0  # seconds between two sweeps: each opens and locks every status file
MAX_FILES = 512  # that are read of one other user, who may create any number


class StatusFiles:
    """The status files in ``directory`` (default: ``run_directory()``).

    With ``all_users``, also those of other users in the usual places. Their files are hidden in place of being removed.
    Status files of dead writers are read for ``keep_stale_seconds`` after their last update, and at least for the first
    ``first_sweep`` seconds; then they are removed. The constructor and ``read()`` raise TelemetryError if other users
    can write to the directory or it cannot be read. ``read()`` is not thread-safe.
    """

    max_age = MAX_AGE

    def __init__(
        self,
        directory: Path | None = None,
        *,
        all_users: bool = False,
        keep_stale_seconds: float = RETENTION_SECONDS,
        first_sweep: float = 0.0,
    ) -> None:
        self.directory = run_directory() if directory is None else Path(directory)
        self.name = as_text(str(self.directory))
        self._keep_stale_seconds = keep_stale_seconds
        self._all_users = all_users
        self._swept_at = time.monotonic() + first_sweep - SWEEP_INTERVAL
        self._find()

    def read(self) -> Reading:
        """All status files now."""
        readings = [(file, file.read()) for file in self._find()]
        if any(reading.state != "live" for _, reading in readings):
            self._sweep()
            readings = [(file, reading) for file, reading in readings if self._is_shown(file, reading)]
        return Reading(readings)

    def _is_shown(self, file: StatusFile, reading: StatusReading) -> bool:
        """Whether the file has not been removed by a sweep, or would not be if it were this user's."""
        if file.owner in (None, os.geteuid()):
            return os.path.lexists(file.path)
        return reading.state == "live" or not is_expired(file.path, self._keep_stale_seconds)

    def _find(self) -> list[StatusFile]:
        files = self._find_own()
        if self._all_users:
            own, left = self.directory.resolve(), defaultdict[int, int](lambda: MAX_FILES)
            for directory, owner in run_directories_of_all_users():
                if directory == own:
                    continue
                # A directory that cannot be read must not hide those of other users.
                with suppress(TelemetryError):
                    found = find_status_files(directory, owner, left[owner])
                    left[owner] -= len(found)
                    files += found
        return files

    def _find_own(self) -> list[StatusFile]:
        try:
            return find_status_files(self.directory)
        except OSError as error:  # no permission, no file descriptor left, a failing disk
            raise TelemetryError(
                f"run directory {self.directory} cannot be read: {error.strerror}; it must belong to this user, with"
                " mode 0700"
            ) from error

    def _sweep(self) -> None:
        if time.monotonic() - self._swept_at < SWEEP_INTERVAL:
            return
        # On a file system that has become read-only, stale status files stay longer.
        with suppress(OSError):
            sweep(self.directory, self._keep_stale_seconds)
        self._swept_at = time.monotonic()
