"""Signals while a command runs: Ctrl-C, SIGTERM from `timeout` and batch systems, SIGHUP from a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, ClassVar

# Two signals within this time count as one: a wrapper such as `timeout` may forward the signal that it received.
REPEAT_SECONDS = 0.5
_TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupts:
    """Within the block, a signal sets ``received`` instead of raising, so that measurements stay complete.

    A second signal ends the process, because transfers on a slow or dead drive cannot be canceled. A nested block
    returns the outer one's object. The class does nothing outside the main thread, where Python handles no signals,
    and for a signal that is ignored (nohup).
    """

    _outermost: ClassVar[Interrupts | None] = None

    def __init__(self) -> None:
        self.received = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:  # noqa: PYI034 # it may be the outer one
        if threading.current_thread() is not threading.main_thread():
            return self
        if Interrupts._outermost is not None:
            return Interrupts._outermost
        Interrupts._outermost = self
        for number in (signal.SIGINT, *_TERMINATIONS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if Interrupts._outermost is self:
            Interrupts._outermost = None
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._first = True, now
        elif now - self._first > REPEAT_SECONDS:
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # the progress line hides the cursor
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def terminations_as_ctrl_c() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does.

    `timeout` signals its child and the child's process group, so a second signal within ``REPEAT_SECONDS`` is ignored.
    An ``Interrupts`` block inside replaces these handlers. In other threads, and for ignored signals, this does
    nothing.
    """
    last = -REPEAT_SECONDS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        is_repeated, last = now - last <= REPEAT_SECONDS, now
        if not is_repeated:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for signal_number in _TERMINATIONS:
            if signal.getsignal(signal_number) is not signal.SIG_IGN:
                before[signal_number] = signal.signal(signal_number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
