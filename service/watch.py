"""Reads the status files of a run directory, once for all clients that ask at the same time."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from service.view import FRESH_SECONDS, View, view_of
from tiering.telemetry import StatusFile, TelemetryError, as_text, find_status_files, run_directory, sweep

KEEP_STALE_SECONDS = 30.0  # long enough for an operator to see that a run died
MAX_AGE = 0.25  # seconds; ranks publish no more often
SWEEP_INTERVAL = 1.0  # seconds between two sweeps: each opens and locks every status file
# Seconds: a directory on tmpfs answers in milliseconds, one on an unreachable file server never.
READ_TIMEOUT = 5.0

log = logging.getLogger(__name__)


class Watch:
    """The status files in ``directory`` (default: ``run_directory()``), read at most every ``max_age`` seconds.

    Status files of dead writers stay in the View for ``keep_stale_seconds`` after their last update, then they are
    removed. A rank that has not published for ``fresh_seconds`` is silent. Any thread may call ``view()``; one event
    loop may call ``now()``. The constructor and each reading raise TelemetryError if other users can write to the
    directory or it cannot be read.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        keep_stale_seconds: float = KEEP_STALE_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
        max_age: float = MAX_AGE,
    ) -> None:
        self.directory = run_directory() if directory is None else Path(directory)
        self._keep_stale_seconds, self._fresh_seconds = keep_stale_seconds, fresh_seconds
        self._max_age = max_age
        self._reading: asyncio.Future[None] | None = None  # shared by all callers of now()
        # Guards the fields below.
        self._lock = threading.Lock()
        self._last: View | None = None
        self._error: TelemetryError | None = None  # of the last reading, if it failed
        self._read_at = self._swept_at = -1e9
        self._find()

    @property
    def last(self) -> View | None:
        """The View of the last successful reading, however old."""
        return self._last

    async def now(self) -> View:
        """``view()`` without blocking the event loop. Callers during a reading wait for that reading.

        Raises TelemetryError also if the directory does not answer within READ_TIMEOUT.
        """
        if not self._is_fresh():
            reading = self._reading
            if reading is None or reading.done():
                reading = self._reading = asyncio.ensure_future(asyncio.to_thread(self._refresh))
            await asyncio.wait({reading}, timeout=READ_TIMEOUT)
            if not reading.done():
                raise TelemetryError(
                    f"run directory {self.directory} has not answered for {READ_TIMEOUT:g} s: check its file system;"
                    " a directory on tmpfs, such as $XDG_RUNTIME_DIR, always answers"
                )
            reading.result()
        return self._latest()

    def view(self) -> View:
        """A View that is at most ``max_age`` seconds old."""
        self._refresh()
        return self._latest()

    async def follow(self, interval: float, *observers: Callable[[View], None]) -> None:
        """Call the observers with a View every ``interval`` seconds until cancelled; errors do not end it."""
        due = time.monotonic()
        while True:
            try:
                view = await self.now()
                for observe in observers:
                    observe(view)
            except TelemetryError:
                pass  # the next request reports it
            except Exception:
                log.exception("the history and the log of runs could not be updated")
            due = max(due + interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _refresh(self) -> None:
        with self._lock:
            if not self._is_fresh():
                self._error = None
                try:
                    self._last = self._read()
                except TelemetryError as error:
                    self._error = error
                self._read_at = time.monotonic()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._read_at < self._max_age

    def _latest(self) -> View:
        if self._error is not None:
            raise self._error
        assert self._last is not None
        return self._last

    def _read(self) -> View:
        taken_at = time.time()
        readings = [(file, file.read()) for file in self._find()]
        if any(reading.state != "live" for _, reading in readings):
            self._sweep()
            readings = [(file, reading) for file, reading in readings if os.path.lexists(file.path)]
        view = view_of(readings, taken_at, fresh_seconds=self._fresh_seconds)
        previous = self._last or View(0.0, ())
        changes = previous.changes + (previous.readings == 0 or view.differs_from(previous))
        return replace(
            view, directory=as_text(str(self.directory)), readings=previous.readings + 1, changes=changes
        )

    def _find(self) -> list[StatusFile]:
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
