"""Ctrl-C, SIGTERM as `timeout` and batch systems send it, and SIGHUP of a closed terminal, while a command runs."""

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

AT_ONCE = 0.5  # seconds within which two are one: what wraps a command may pass on what it got as well
_TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)
_SHOW_CURSOR = b"\x1b[?25h\n"


class Interrupts:
    """Within the block an interruption is noted in ``came``, not raised: what was measured stays whole.

    A drive may be slow, or dead, and what is under way on it cannot be taken back: a second interruption ends the
    process. A block within another has the outer one's. Outside the main thread, where Python handles no signals, and
    for one that is ignored (nohup) this does nothing.
    """

    _outermost: ClassVar[Interrupts | None] = None

    def __init__(self) -> None:
        self.came = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:  # noqa: PYI034 # which may be the outer one
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
        if not self.came:
            self.came, self._first = True, now
        elif now - self._first > AT_ONCE:
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # the line of progress has hidden it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextlib.contextmanager
def terminations_as_ctrl_c() -> Iterator[None]:
    """Within the block, what asks this process to end raises KeyboardInterrupt, as Ctrl-C does.

    `timeout` sends it to its child and to the group that this is in: the second of two at once is the first one again.
    An ``Interrupts`` within has its own answer. In other threads, and for what is ignored, this does nothing.
    """
    last = -AT_ONCE

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        again, last = now - last <= AT_ONCE, now
        if not again:
            raise KeyboardInterrupt

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for asked in _TERMINATIONS:
            if signal.getsignal(asked) is not signal.SIG_IGN:
                before[asked] = signal.signal(asked, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
