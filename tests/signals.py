"""Signals whose handlers raise: at random instants, and at every point where Python looks for them."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import tiering

ROOT = Path(tiering.__file__).parent.parent
OURS = (str(ROOT / "zero3"), str(ROOT / "tiering"))

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


def interrupted(
    call: Callable[[], Any], moment: int, met: list[str], number: int = signal.SIGINT, times: int = 1
) -> bool:
    """Call ``call`` with signal ``number`` at the ``moment``-th point in our own code where Python looks for signals.

    That is where a function of ours is entered, and where one returns that is not in Python. ``met`` gets the point's
    name, if there are as many. Returns whether the interrupt ended the call.
    """
    passed = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal passed
        code = frame.f_code
        # In a finalizer, as one of a generator, Python prints the exception and goes on: nobody can answer it there.
        if (
            event not in ("call", "c_return")
            or not code.co_filename.startswith(OURS)
            or code.co_name in ("__del__", "<genexpr>")
        ):
            return
        passed += 1
        if passed == moment:
            met.append(f"{Path(code.co_filename).name}:{frame.f_lineno}, {code.co_name} ({event})")
            for _ in range(times):
                signal.raise_signal(number)

    sys.setprofile(look)
    try:
        call()
    except (KeyboardInterrupt, TimeoutError):
        return True
    finally:
        sys.setprofile(None)
    return False
