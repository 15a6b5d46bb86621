"""Watching a run directory: one reading at a time, however many ask."""

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
SWEEPING = 1.0  # seconds between two sweeps: each opens and locks every page
# Seconds: a directory on tmpfs answers in milliseconds, one on a server that is gone never does.
PATIENCE = 5.0

log = logging.getLogger(__name__)


class Watch:
    """The pages in ``directory`` (default: ``run_directory()``), read at most every ``max_age`` seconds.

    Pages of dead writers are shown for ``keep_stale_seconds`` after their last update, then removed; a rank that has
    not published for ``fresh_seconds`` is silent. May be used from any thread, and from one event loop. Raises
    TelemetryError when the directory is not ours alone or cannot be read: when made, and whenever it is read.
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
        self._reading: asyncio.Future[None] | None = None  # of those who await
        self._lock = threading.Lock()  # of what follows
        self._last: View | None = None
        self._refusal: TelemetryError | None = None  # what the last reading came to, where it came to nothing
        self._read_at = self._swept_at = -1e9
        self._find()

    @property
    def last(self) -> View | None:
        """What the pages said when they could last be read, however long ago."""
        return self._last

    async def now(self) -> View:
        """``view()`` without holding up the event loop; who comes while one reads waits for that reading, not for ever.

        Raises TelemetryError for a directory that does not answer within PATIENCE, too.
        """
        if not self._is_fresh():
            reading = self._reading
            if reading is None or reading.done():
                reading = self._reading = asyncio.ensure_future(asyncio.to_thread(self._refresh))
            await asyncio.wait({reading}, timeout=PATIENCE)
            if not reading.done():
                raise TelemetryError(
                    f"run directory {self.directory} has not answered for {PATIENCE:g} s: is its file system still"
                    " there? One on tmpfs, as $XDG_RUNTIME_DIR is, always answers"
                )
            reading.result()
        return self._told()

    def view(self) -> View:
        """What the pages say now, or said less than ``max_age`` seconds ago."""
        self._refresh()
        return self._told()

    async def follow(self, interval: float, *told: Callable[[View], None]) -> None:
        """Tell them a View every ``interval`` seconds until cancelled, whatever happens to the pages, or to them."""
        due = time.monotonic()
        while True:
            try:
                view = await self.now()
                for tell in told:
                    tell(view)
            except TelemetryError:
                pass  # whoever asks is told
            except Exception:
                log.exception("what the pages said could not be kept")
            due = max(due + interval, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _refresh(self) -> None:
        with self._lock:
            if not self._is_fresh():
                self._refusal = None
                try:
                    self._last = self._read()
                except TelemetryError as error:
                    self._refusal = error
                self._read_at = time.monotonic()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._read_at < self._max_age

    def _told(self) -> View:
        if self._refusal is not None:
            raise self._refusal
        assert self._last is not None
        return self._last

    def _read(self) -> View:
        taken_at = time.time()
        readings = [(page, page.read()) for page in self._find()]
        if any(reading.state != "live" for _, reading in readings):
            self._sweep()
            readings = [(page, reading) for page, reading in readings if os.path.lexists(page.path)]
        view = view_of(readings, taken_at, fresh_seconds=self._fresh_seconds)
        before = self._last or View(0.0, ())
        changes = before.changes + (before.readings == 0 or view.tells_more_than(before))
        return replace(
            view, directory=as_text(str(self.directory)), readings=before.readings + 1, changes=changes
        )

    def _find(self) -> list[StatusFile]:
        try:
            return find_status_files(self.directory)
        except OSError as error:  # closed to us, no descriptor left, a disk that fails
            raise TelemetryError(
                f"run directory {self.directory} cannot be read: {error.strerror}; it should be its owner's, with mode"
                " 0700"
            ) from error

    def _sweep(self) -> None:
        if time.monotonic() - self._swept_at < SWEEPING:
            return
        with suppress(OSError):  # of a file system that has become read-only: what stays is shown for longer
            sweep(self.directory, self._keep_stale_seconds)
        self._swept_at = time.monotonic()
