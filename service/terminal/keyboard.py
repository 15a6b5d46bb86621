"""Keys and signals of a terminal, for as long as a program has its screen."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

_LEAVING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# The last two are Ctrl-C and Ctrl-D, where the terminal makes no signal of them.
_LEAVING_KEYS = set(b"qQ\x03\x04")


class Keyboard:
    """Keys, and signals as if they were keys: each is a byte of a pipe that wakes up who waits."""

    def __init__(self, signals: int) -> None:
        self._signals = signals

    def wait(self, due: float) -> Literal["leave", "redraw", "next"]:
        """What comes first: a wish to leave, a new size of the terminal, or ``due`` (of time.monotonic)."""
        while (left := due - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin, self._signals], [], [], left)
            if sys.stdin in ready:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or set(keys) & _LEAVING_KEYS:  # a terminal that is gone reads as nothing
                    return "leave"
            if self._signals in ready:
                came = set(os.read(self._signals, 64))
                return "leave" if came & _LEAVING else "redraw"
        return "next"


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Keys without Enter and echo, until the end of the block: then the terminal is as it was, whatever happened.

    Ctrl-Z does nothing meanwhile: a shell would get a terminal that shows another screen.
    """
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    quiet[6][termios.VSUSP] = b"\0"
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    waking = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers = {one: signal.signal(one, lambda *_: None) for one in (*_LEAVING, signal.SIGWINCH)}
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield Keyboard(reading)
    finally:
        with suppress(termios.error):  # a terminal that is gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.set_wakeup_fd(waking)
        for one, handler in handlers.items():
            signal.signal(one, handler)
        os.close(reading)
        os.close(writing)
