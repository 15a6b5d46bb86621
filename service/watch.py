"""Reads the status of the ranks from its source, once for all clients that ask at the same time."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from service.source import Source
from service.view import FRESH_SECONDS, View, view_of
from tiering.telemetry import TelemetryError

# Seconds: a directory on tmpfs answers in milliseconds, one on an unreachable file server never.
READ_TIMEOUT = 5.0

log = logging.getLogger(__name__)


class Watch:
    """The status of the ranks in ``source``, read at most every ``max_age`` seconds (default: that of the source).

    A rank that has not published for ``fresh_seconds`` is silent. Any thread may call ``view()``; one event loop may
    call ``now()``. Each reading raises the TelemetryError of the source.
    """

    def __init__(
        self, source: Source, *, fresh_seconds: float = FRESH_SECONDS, max_age: float | None = None
    ) -> None:
        self.source = source
        self._fresh_seconds, self._max_age = fresh_seconds, max_age
        self._reading: asyncio.Future[None] | None = None  # shared by all callers of now()
        # Guards the fields below.
        self._lock = threading.Lock()
        self._last: View | None = None
        self._error: TelemetryError | None = None  # of the last reading, if it failed
        self._read_at = -1e9

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
                    f"run directory {self.source.name} has not answered for {READ_TIMEOUT:g} s: check its file system;"
                    " a directory on tmpfs, such as $XDG_RUNTIME_DIR, always answers"
                )
            reading.result()
        return self._latest()

    def view(self) -> View:
        """A View that is at most ``max_age`` seconds old."""
        self._refresh()
        return self._latest()

    async def follow(self, interval: float, *observers: Callable[[View], None]) -> None:
        """Call the observers with each new View, every ``interval`` seconds, until cancelled; errors do not end it."""
        due, observed = time.monotonic(), None
        while True:
            try:
                # The next request reports that nothing can be read.
                with suppress(TelemetryError):
                    view = await self.now()
                    if view is not observed:
                        observed = view
                        for observe in observers:
                            observe(view)
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
        max_age = self.source.max_age if self._max_age is None else self._max_age
        return time.monotonic() - self._read_at < max_age

    def _latest(self) -> View:
        if self._error is not None:
            raise self._error
        assert self._last is not None
        return self._last

    def _read(self) -> View:
        taken_at = time.time()
        view = view_of(self.source.read(), taken_at, fresh_seconds=self._fresh_seconds)
        previous = self._last or View(0.0, ())
        changes = previous.changes + (previous.readings == 0 or view.differs_from(previous))
        return replace(view, directory=self.source.name, readings=previous.readings + 1, changes=changes)
