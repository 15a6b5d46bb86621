"""Signals whose handlers raise, at random instants."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SOONEST, LATEST = 2e-6, 4e-4
"""Seconds. A submission takes some tens of microseconds; waiting for it takes the rest."""


class StruckError(Exception):
    """Raised by the handlers of SIGUSR1."""


def _time_out(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError("the user's own")  # as a watchdog's handler does; I/O errors are OSErrors, too


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
        """Run ``call``; whether a signal has ended it."""
        self._next = self._random.choice(list(HANDLERS))
        delay = SOONEST * (latest / SOONEST) ** self._random.random()
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
        return False

    def on_alarm(self, number: int, frame: FrameType | None) -> None:
        """Of the timer, the only thing that is precise to a microsecond: sends the signal that is due."""
        if self._next is signal.SIGALRM:
            _time_out(number, frame)
        signal.raise_signal(self._next)


@contextmanager
def striking(seed: int) -> Iterator[Striker]:
    """A Striker; the handlers are as before when the block ends."""
    striker = Striker(seed)
    handlers = {**HANDLERS, signal.SIGALRM: striker.on_alarm}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield striker
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
