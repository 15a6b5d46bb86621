"""Signals at a moment that suits.

Ctrl-C waits where it must not cut in: half an update is no state that anybody could use, and a transfer that was begun
but not noted would go on in memory that its owner has given back. SIGTERM and SIGUSR1, by which batch systems announce
the end, can be taken as a request that training answers after its step.
"""

from __future__ import annotations

import functools
import os
import signal
import threading

# Events of every module pass through here: without the conversions to enums that the public functions add.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from tiering.errors import ConfigError, EngineStateError

EXIT_SAVED = 75
"""Exit status of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

P = ParamSpec("P")
R = TypeVar("R")


class deferred_interrupts:  # noqa: N801 # read as a function
    """Within the block the first SIGINT is held back; a second one goes through at once.

    Only where Python handles signals (the main thread) and a Python handler is set; elsewhere this does nothing.
    """

    __slots__ = ("_handler", "_held")

    def __enter__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held: list[tuple[int, FrameType | None]] = []
        # By number: to a thread that Python has not made, as autograd's, current_thread() gives an object that stays.
        if threading.get_ident() == threading.main_thread().ident:
            handler = _get_handler(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handler)
            if self._held:
                self._handler(*self._held[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        if len(self._held) > 1:
            self._held.clear()
            assert self._handler is not None
            self._handler(number, frame)


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` under ``deferred_interrupts``."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        with deferred_interrupts():
            return function(*args, **kwargs)

    return whole


class StopRequest:
    """Notes the first of ``signals`` (names, as "SIGTERM") in ``received``, in place of what they did before.

    ConfigError for a name that is no signal that can be handled; EngineStateError outside of the main thread, where
    Python handles none.
    """

    def __init__(self, signals: Iterable[str]) -> None:
        self.received = ""
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise EngineStateError("signals can only be handled in the main thread; call this there")
        numbers = [_signal(name) for name in signals]
        for number in numbers:
            self._before[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Let the signals do what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if (
            os.getpid() != self._process
        ):  # a forked child (a data worker) that is told to end has no step to finish
            signal.signal(number, self._before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number).name


def _signal(name: str) -> signal.Signals:
    known = getattr(signal.Signals, name, None)
    if known is None or known in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{name!r} is no signal that can be handled; 'SIGTERM' and 'SIGUSR1' are usual")
    assert isinstance(known, signal.Signals)
    return known
