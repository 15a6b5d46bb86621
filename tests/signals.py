"""Signals whose handlers raise, at random instants."""

from __future__ import annotations

import gc
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SOONEST, LATEST = 2e-6, 4e-4
"""Seconds. A submission takes some tens of microseconds; the wait for it takes the remaining time."""


class StruckError(Exception):
    """Raised by the handlers of SIGUSR1."""


def _time_out(number: int, frame: FrameType | None) -> NoReturn:
    # As the handler of a watchdog does. TimeoutError is an OSError, as I/O errors are.
    raise TimeoutError("from the user's handler")


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(1)


def _strike(number: int, frame: FrameType | None) -> NoReturn:
    raise StruckError


HANDLERS: dict[signal.Signals, Callable[[int, FrameType | None], NoReturn]] = {
    signal.SIGALRM: _time_out,
    signal.SIGTERM: _exit,
    signal.SIGUSR1: _strike,
    signal.SIGINT: signal.default_int_handler,  # type: ignore[dict-item]
}
RAISED = (TimeoutError, SystemExit, StruckError, KeyboardInterrupt)


class Striker:
    """Sends this process one of HANDLERS' signals at a random instant of a call."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next: signal.Signals = signal.SIGALRM
        self.struck = 0

    def during(self, call: Callable[[], object], latest: float = LATEST) -> bool:
        """Run ``call``, and return whether a signal has ended it."""
        self._next = self._random.choice(list(HANDLERS))
        delay = SOONEST * (latest / SOONEST) ** self._random.random()
        # An exception in a callback of the garbage collector, as hypothesis has one, would be lost.
        gc.disable()
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            try:
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except RAISED:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.struck += 1
            return True
        finally:
            gc.enable()
        return False

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        """The handler of the timer, which is precise to a microsecond: raises the selected signal."""
        if self._next is signal.SIGALRM:
            _time_out(number, frame)
        signal.raise_signal(self._next)


@contextmanager
def striking(seed: int) -> Iterator[Striker]:
    """A Striker. The end of the block restores the handlers."""
    striker = Striker(seed)
    handlers = {**HANDLERS, signal.SIGALRM: striker.on_alarm}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield striker
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
