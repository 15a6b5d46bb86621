"""Signals at a moment that suits.

Ctrl-C waits where it must not cut in: half an update is no state that anybody could use, and a transfer that was begun
but not noted would go on in memory that its owner has given back. SIGTERM and SIGUSR1, by which batch systems announce
the end, can be taken as a request that training answers after its step.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from tiering.errors import ConfigError, EngineStateError

EXIT_SAVED = 75
"""Exit status of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold the first SIGINT back until the block ends; a second one goes through at once.

    Only where Python handles signals (the main thread) and a Python handler is set; elsewhere this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])


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
        self.received = self.received or signal.Signals(number).name


def _signal(name: str) -> signal.Signals:
    known = getattr(signal.Signals, name, None)
    if known is None or known in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{name!r} is no signal that can be handled; 'SIGTERM' and 'SIGUSR1' are usual")
    assert isinstance(known, signal.Signals)
    return known
