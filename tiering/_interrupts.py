"""Interrupts of a program: deferred handling of signals, and the code that ``sys.exit`` was called with.

A signal handler that raises must not interrupt an update of state, which would be left half done: the signal is
deferred to the end of the block. A second one interrupts the block, but not an ``atomic`` part of it. Transfers and
leases do not need this (see tiering/storage/). SIGTERM and SIGUSR1, by which batch systems announce the end of a job,
can become a request that training answers after its step.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading

# The private functions, which do not convert to enums: each hook of each module enters deferred_interrupts.
from _signal import getsignal as _get_handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeVar

from tiering.errors import ConfigError, EngineStateError

EXIT_SAVED = 75
"""Exit status of a run that saved after a stop signal: EX_TEMPFAIL of sysexits.h, "try again later"."""

P = ParamSpec("P")
R = TypeVar("R")


DEFERRED_SIGNALS = tuple(
    signal.Signals[name].value
    for name in ("SIGHUP", "SIGINT", "SIGQUIT", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
)
"""Signals that end a process or announce the end of its time: their handlers may raise."""

GRACE_SECONDS = 30.0
"""Limit of the deferral of signals other than SIGINT: a watchdog may send them because the block hangs."""

_Handler = Callable[[int, FrameType | None], Any]

_exit_code: object = None
"""The argument of the last call of ``sys.exit`` since ``forget_exit_code``; None without a call."""


class deferred_interrupts:  # noqa: N801 # used like a function
    """Within the block, the first signal of each of DEFERRED_SIGNALS is deferred; a second one is handled at once.

    Works in the main thread, where Python handles signals, and for signals with a Python handler; does nothing
    elsewhere. A handler that a library installed in C stays installed.
    """

    __slots__ = ("_again", "_frames", "_handlers", "_timers")

    _outermost: ClassVar[deferred_interrupts | None] = None

    def __enter__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        # Compare identifiers: for a thread that Python did not create, such as autograd's, current_thread() creates an
        # object that is never freed.
        if (
            deferred_interrupts._outermost is not None
            or threading.get_ident() != threading.main_thread().ident
        ):
            return
        self._frames: dict[int, FrameType | None] = {}
        self._again: dict[int, FrameType | None] = {}  # a second time, in an atomic block
        self._timers: list[threading.Timer] = []
        try:
            for number in DEFERRED_SIGNALS:
                handler = _get_handler(number)
                if callable(handler) and _raises(number, handler):
                    self._handlers[number] = handler
                    _set_handler(number, self._defer)
            deferred_interrupts._outermost = self
        except BaseException:
            # A signal that is not deferred yet raised in its handler.
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        if self._handlers:
            self._restore()

    def _restore(self) -> None:
        """Restore all handlers and call those of deferred signals. Raises the exception of the last that raised."""
        exception: BaseException | None = None
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
                # From the handler of a deferred signal, or of one that arrives now. Go on: handlers remain to be
                # restored or called.
                exception = error
        if exception is not None:
            raise exception

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if number in self._frames:
            self._again[number] = frame
            if not atomic.depth:
                self.handle_second()
            return
        self._frames[number] = frame
        if number != signal.SIGINT:
            timer = threading.Timer(GRACE_SECONDS, os.kill, (os.getpid(), number))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def handle_second(self) -> None:
        """Call the handlers of the signals that have arrived a second time."""
        while self._again:
            number, frame = self._again.popitem()
            self._frames.pop(number, None)
            self._handlers[number](number, frame)


class atomic(deferred_interrupts):  # noqa: N801 # used like a function
    """As deferred_interrupts; within the block, a second signal is deferred, too.

    For changes that belong together. A block that waits calls ``poll``, which lets a second signal through.
    """

    __slots__ = ("_counts",)

    depth: ClassVar[int] = 0
    """Of the blocks in the main thread."""

    def __enter__(self) -> None:
        self._counts = threading.get_ident() == threading.main_thread().ident
        # First: from here on the handler of an outer block raises nothing, and so the next lines are not interrupted.
        atomic.depth += self._counts
        try:
            super().__enter__()
        except BaseException:
            atomic.depth -= self._counts
            raise

    def __exit__(self, *error: object) -> None:
        try:
            atomic.depth -= self._counts
            if not atomic.depth:
                self.poll()
        finally:
            super().__exit__()

    @staticmethod
    def poll() -> None:
        """Handle the signals that have arrived a second time; their handlers may raise."""
        outermost = deferred_interrupts._outermost
        if outermost is not None and threading.get_ident() == threading.main_thread().ident:
            outermost.handle_second()


def _raises(number: int, handler: _Handler) -> bool:
    """Whether the handler may raise: not a StopRequest, and not if the system does not call Python for the signal.

    A library may have installed a C handler after Python's. Python would replace it, and could not restore it.
    """
    return _installed(number) == _python_handler() and not isinstance(
        getattr(handler, "__self__", None), StopRequest
    )


@functools.cache
def _python_handler() -> int | None:
    """The address of the C function that Python installs for every signal, read at a signal without a handler."""
    for number in range(signal.SIGRTMAX, signal.SIGRTMIN, -1):
        default = _get_handler(number)
        if _installed(number) is None and default == signal.SIG_DFL:
            _set_handler(number, signal.default_int_handler)
            try:
                return _installed(number)
            finally:
                _set_handler(number, default)
    return None


# The address of a signal's handler in the operating system; None for the default action.
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
    """Replaces the handlers of ``signals`` (names, as "SIGTERM"): the name of the first is stored in ``received``.

    Raises ConfigError for a name that is not a signal or cannot be handled, and EngineStateError outside of the main
    thread, where Python cannot install handlers.
    """

    def __init__(self, signals: Iterable[str]) -> None:
        self.received = ""
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise EngineStateError(
                "signal handlers can only be installed in the main thread; call this there"
            )
        numbers = [_signal(name) for name in signals]
        for number in numbers:
            self._before[number] = signal.signal(number, self._record)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data worker) has no step to finish: the signal gets its previous effect.
        if os.getpid() != self._process:
            signal.signal(number, self._before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number).name


def _signal(name: str) -> signal.Signals:
    number = getattr(signal.Signals, name, None)
    if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{name!r} is not a signal that can be handled; use for example 'SIGTERM'")
    assert isinstance(number, signal.Signals)
    return number


def note_exit_codes() -> None:
    """Note arguments of ``sys.exit`` from now on, because they are not available at the exit of the interpreter."""
    exit_before: Callable[..., NoReturn] = sys.exit
    if getattr(exit_before, "notes_code", False):
        return

    @functools.wraps(exit_before)
    def noting_exit(status: object = None, /) -> NoReturn:
        global _exit_code
        # In another thread, ``sys.exit`` ends only that thread.
        if threading.current_thread() is threading.main_thread():
            _exit_code = status
        exit_before(status)

    noting_exit.notes_code = True  # type: ignore[attr-defined]
    sys.exit = noting_exit


def noted_exit_code() -> object:
    """The argument of the last call of ``sys.exit`` in the main thread, or None."""
    return _exit_code


def forget_exit_code() -> None:
    """Forget an earlier ``sys.exit``, which has not ended the program."""
    global _exit_code
    _exit_code = None
