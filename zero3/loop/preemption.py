"""Preemption: a run that is told to end does so after its step, saved, with a code that says "try again later"."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable

from tiering import logs
from tiering.interrupts import EXIT_SAVED, StopRequest
from zero3.loop.step import Update

log = logging.getLogger(__name__)


class Preemption:
    """Signals that ask to stop, and what is done about them. Ranks tell each other in a step, by ``updates``."""

    def __init__(self, updates: Update, *, alone: bool) -> None:
        self._updates = updates
        self._alone = alone
        self._stop: StopRequest | None = None
        self._save: Callable[[], object] | None = None

    def expect(self, signals: Iterable[str], save: Callable[[], object] | None) -> None:
        """Take ``signals`` as the request from now on, in place of those before. See Engine.save_and_exit_on."""
        self.close()
        self._stop = StopRequest(signals)
        self._save = save

    def close(self) -> None:
        """Let the signals do what they did before."""
        if self._stop is not None:
            self._stop.restore()

    @property
    def asked(self) -> int:
        """The number of the signal that has asked this rank to stop; 0 if none has."""
        received = self._stop.received if self._stop is not None else ""
        return signal.Signals[received].value if received else 0

    @property
    def requested(self) -> str:
        """The name of the signal that has asked to stop, known to all ranks alike; empty if none has."""
        number = self.asked if self._alone else self._updates.stop
        return signal.Signals(number).name if number else ""

    def answer(self, close: Callable[[], None]) -> None:
        """A step has ended: if somebody has asked, save, ``close`` and exit."""
        if self._save is None or not self.requested:
            return
        log.log(
            logs.once(logging.WARNING),
            "%s: saving after step %d, then exit %d",
            *(self.requested, self._updates.steps, EXIT_SAVED),
        )
        self._save()
        close()
        raise SystemExit(EXIT_SAVED)
