"""Signals at a moment that suits.

A signal whose handler raises waits where it must not cut in: half an update is no state that anybody could use.
Transfers and leases need no such care (see tiering/storage/). SIGTERM and SIGUSR1, by which batch systems
announce the end, can be taken as a request that training answers after its step.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading

# Events of every module pass through here: without the conversions to enums that the public functions add.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar, ParamSpec, TypeVar

from tiering.errors import ConfigError, EngineStateError

EXIT_SAVED = 75
"""Exit status of a run that was asked to stop and has saved: EX_TEMPFAIL of sysexits.h, "try again later"."""

P = ParamSpec("P")
R = TypeVar("R")


HELD = tuple(
    signal.Signals[name].value
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
)
"""Signals by which a process is told to end, or that its time is up: their handlers raise."""

GRACE_SECONDS = 30.0
"""So long a signal other than SIGINT is held back at most: it may come from a watchdog, because the block hangs."""

_Handler = Callable[[int, FrameType | None], Any]


class deferred_interrupts:  # noqa: N801 # read as a function
    """Within the block the first of each of HELD is held back; a second one goes through at once.

    Only where Python handles signals (the main thread) and a Python handler is set; elsewhere this does nothing. A
    handler that was installed in C, past Python, stays as it is.
    """

    __slots__ = ("_frames", "_handlers", "_timers")

    _outermost: ClassVar[deferred_interrupts | None] = None

    def __enter__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        # By number: to a thread that Python has not made, as autograd's, current_thread() gives an object that stays.
        if (
            deferred_interrupts._outermost is not None
            or threading.get_ident() != threading.main_thread().ident
        ):
            return
        self._frames: dict[int, FrameType | None] = {}
        self._timers: list[threading.Timer] = []
        try:
            for number in HELD:
                handler = _get_handler(number)
                if callable(handler) and _raises(number, handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._hold)
            deferred_interrupts._outermost = self
        except BaseException:  # by the handler of one that is not held yet
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        if self._handlers:
            self._restore()

    def _restore(self) -> None:
        """Put all handlers back and call those whose signals were held. Raises what the last one raised."""
        raised: BaseException | None = None
        while True:
            try:
                deferred_interrupts._outermost = None
                for number, handler in self._handlers.items():
                    _set_handler(number, handler)
                for timer in self._timers:
                    timer.cancel()
                while self._frames:
                    number = next(iter(self._frames))
                    self._handlers[number](number, self._frames.pop(number))
                break
            except BaseException as error:
                # Of a handler that was held, or of one that a signal calls now: the rest is still to be done.
                raised = error
        if raised is not None:
            raise raised

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if number in self._frames:
            del self._frames[number]
            self._handlers[number](number, frame)
            return
        self._frames[number] = frame
        if number != signal.SIGINT:
            timer = threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), number))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()


def _raises(number: int, handler: _Handler) -> bool:
    """Whether it may: not if it only takes note, and not if the system does not call Python for the signal.

    A library may have put a handler in C in its place since. Python would replace that, and could not put it back.
    """
    return _installed(number) == _python_handler() and not isinstance(
        getattr(handler, "__self__", None), StopRequest
    )


@functools.cache
def _python_handler() -> int | None:
    """The address that Python installs for every signal, looked up where nothing is installed."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        default = _get_handler(number)
        if _installed(number) is None and default == signal.SIG_DFL:
            _set_handler(number, signal.default_int_handler)
            try:
                return _installed(number)
            finally:
                _set_handler(number, default)
    return None


# The address of a signal's handler, as the system has it; None for the default action.
_installed: Callable[[int], int | None] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(
    ("PyOS_getsig", ctypes.pythonapi)
)


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
        # A forked child (a data worker) has no step to finish.
        if os.getpid() != self._process:
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
