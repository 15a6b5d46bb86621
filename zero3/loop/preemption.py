"""Preemption: after a stop signal, a run saves, and exits after its step with the code for "try again later"."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable

from tiering import _logs
from tiering._interrupts import EXIT_SAVED, StopRequest
from zero3.loop.step import Update

log = logging.getLogger(__name__)


class Preemption:
    """Handles stop signals. Ranks exchange them in each step, in ``updates``."""

    def __init__(self, updates: Update, *, alone: bool) -> None:
        self._updates = updates
        self._alone = alone
        self._request: StopRequest | None = None
        self._save: Callable[[], object] | None = None

    def handle(self, signals: Iterable[str], save: Callable[[], object] | None) -> None:
        """Handle ``signals`` from now on, instead of earlier ones. See Engine.save_and_exit_on."""
        self.close()
        self._request = StopRequest(signals)
        self._save = save

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        if self._request is not None:
            self._request.restore()

    @property
    def received_signal(self) -> int:
        """The number of the stop signal that this rank has received, or 0."""
        received = self._request.received if self._request is not None else ""
        return signal.Signals[received].value if received else 0

    @property
    def requested(self) -> str:
        """The name of the stop signal, which all ranks know since the same step, or ""."""
        number = self.received_signal if self._alone else self._updates.stop
        return signal.Signals(number).name if number else ""

    def save_and_exit(self, close: Callable[[], None]) -> None:
        """After a step: if a stop was requested, save, call ``close`` and raise SystemExit."""
        if self._save is None or not self.requested:
            return
        log.log(
            _logs.once(logging.WARNING),
            "%s: saving after step %d, then exit %d",
            *(self.requested, self._updates.steps, EXIT_SAVED),
        )
        self._save()
        close()
        raise SystemExit(EXIT_SAVED)
