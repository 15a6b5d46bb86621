"""Keys and signals of a terminal while a program uses its screen."""

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

_QUIT_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# The last two are Ctrl-C and Ctrl-D in a terminal that does not turn them into signals.
_QUIT_KEYS = set(b"qQ\x03\x04")


class Keyboard:
    """Keys and signals; each signal is a byte in a pipe, which wakes up ``wait()``."""

    def __init__(self, signals: int) -> None:
        self._signals = signals

    def wait(self, due: float) -> Literal["quit", "redraw", "next"]:
        """The first event: "quit", a new size of the terminal, or the time ``due`` (of time.monotonic)."""
        while (remaining := due - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin, self._signals], [], [], remaining)
            if sys.stdin in ready:
                keys = os.read(sys.stdin.fileno(), 64)
                if not keys or set(keys) & _QUIT_KEYS:  # a terminal that was closed reads as empty
                    return "quit"
            if self._signals in ready:
                signals = set(os.read(self._signals, 64))
                return "quit" if signals & _QUIT_SIGNALS else "redraw"
        return "next"


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Read keys without Enter and echo inside the block. At its end the terminal's settings are restored.

    Ctrl-Z is disabled meanwhile: the shell would get a terminal with the alternate screen.
    """
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    quiet[6][termios.VSUSP] = b"\0"
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    waking = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handlers = {
        number: signal.signal(number, lambda *_: None) for number in (*_QUIT_SIGNALS, signal.SIGWINCH)
    }
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield Keyboard(reading)
    finally:
        with suppress(termios.error):  # a closed terminal
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.set_wakeup_fd(waking)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)
