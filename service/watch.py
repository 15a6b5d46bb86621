"""Watching a run directory: one reading at a time, however many ask."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from service.view import View, view_of
from tiering.telemetry import find_pages, run_directory, sweep

KEEP_STALE_SECONDS = 30.0  # long enough for an operator to see that a run died
MAX_AGE = 0.25  # seconds; ranks publish no more often


class Watch:
    """The pages in ``directory`` (default: ``run_directory()``), read at most every ``max_age`` seconds.

    Pages of dead writers are shown for ``keep_stale_seconds`` after their last update, then removed. May be used from
    any thread. Raises TelemetryError when the directory is not ours alone: when made, and whenever it is read.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        keep_stale_seconds: float = KEEP_STALE_SECONDS,
        max_age: float = MAX_AGE,
    ) -> None:
        self.directory = run_directory() if directory is None else Path(directory)
        self._keep_stale_seconds, self._max_age = keep_stale_seconds, max_age
        self._lock = threading.Lock()
        self._view: View | None = None
        self._read_at = 0.0
        find_pages(self.directory)

    def view(self) -> View:
        """What the pages say now, or said less than ``max_age`` seconds ago."""
        with self._lock:
            if self._view is None or time.monotonic() - self._read_at >= self._max_age:
                self._view = self._read()
                self._read_at = time.monotonic()
            return self._view

    def _read(self) -> View:
        sweep(self.directory, self._keep_stale_seconds)
        readings = [(page, page.read()) for page in find_pages(self.directory)]
        return view_of((page, reading) for page, reading in readings if page.path.exists())
