"""Watching a run directory: one reading at a time, however many ask."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from service.view import FRESH_SECONDS, View, view_of
from tiering.telemetry import TelemetryError, as_text, find_pages, run_directory, sweep

KEEP_STALE_SECONDS = 30.0  # long enough for an operator to see that a run died
MAX_AGE = 0.25  # seconds; ranks publish no more often


class Watch:
    """The pages in ``directory`` (default: ``run_directory()``), read at most every ``max_age`` seconds.

    Pages of dead writers are shown for ``keep_stale_seconds`` after their last update, then removed. May be used from
    any thread, and from one event loop. Raises TelemetryError when the directory is not ours alone or cannot be read:
    when made, and whenever it is read.
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
        self._turn = asyncio.Lock()  # of those who await
        self._lock = threading.Lock()  # of what follows
        self._last: View | None = None
        self._refusal: TelemetryError | None = None  # what the last reading came to, where it came to nothing
        self._read_at = -1e9
        find_pages(self.directory)

    @property
    def last(self) -> View | None:
        """What the pages said when they could last be read, however long ago."""
        return self._last

    async def now(self) -> View:
        """``view()`` without holding up the event loop; who comes while one reads waits for that reading."""
        if not self._is_fresh():
            async with self._turn:
                if not self._is_fresh():
                    return await asyncio.to_thread(self.view)
        return self._told()

    def view(self) -> View:
        """What the pages say now, or said less than ``max_age`` seconds ago."""
        with self._lock:
            if not self._is_fresh():
                self._refusal = None
                try:
                    self._last = self._read()
                except TelemetryError as error:
                    self._refusal = error
                except OSError as error:  # no descriptor left, or a disk that fails
                    self._refusal = self._unreadable(error)
                self._read_at = time.monotonic()
        return self._told()

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._read_at < self._max_age

    def _told(self) -> View:
        if self._refusal is not None:
            raise self._refusal
        assert self._last is not None
        return self._last

    def _read(self) -> View:
        taken_at = time.time()
        pages = find_pages(self.directory)
        if not pages:
            self._look_inside()
        readings = [(page, page.read()) for page in pages]
        if any(reading.state != "live" for _, reading in readings):
            self._sweep()
            readings = [(page, reading) for page, reading in readings if _is_there(page.path)]
        view = view_of(readings, taken_at, fresh_seconds=self._fresh_seconds)
        before = self._last or View(0.0, ())
        changes = before.changes + (before.readings == 0 or view.tells_more_than(before))
        return replace(
            view, directory=as_text(str(self.directory)), readings=before.readings + 1, changes=changes
        )

    def _look_inside(self) -> None:
        """Nothing there, or nothing to be seen? find_pages takes them for the same."""
        try:
            next(self.directory.iterdir(), None)
        except FileNotFoundError:  # nobody has published yet
            pass
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> TelemetryError:
        return TelemetryError(
            f"run directory {self.directory} cannot be read: {error.strerror}; it should be its owner's, with mode 0700"
        )

    def _sweep(self) -> None:
        with suppress(OSError):  # of a file system that has become read-only: what stays is shown for longer
            sweep(self.directory, self._keep_stale_seconds)


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
