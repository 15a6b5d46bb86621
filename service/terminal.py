"""``tierd --once`` and ``tierd top``: the runs of this node in a terminal, read from their pages without a server."""

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

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from service.answers.status import status
from service.history import History
from service.picture import Marks, marks, pictured
from service.view import View
from service.watch import Watch
from tiering.telemetry import TelemetryError

_LEAVING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_LEAVING_KEYS = set(
    b"qQ\x03\x04"
)  # the last two are Ctrl-C and Ctrl-D, where the terminal makes no signal of them


def once(view: View, *, json: bool = False) -> int:
    """Print what the runs do now: 0, or 1 if one of them is degraded or has ended by itself."""
    told = status(view)
    console = Console(highlight=False)
    try:
        if json:
            print(told.model_dump_json(), flush=True)
        else:
            console.print(pictured(told, console.width, marks(console.encoding)))
    except BrokenPipeError:  # `| head` has seen enough; nor is there anything to flush at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(run.state != "training" for run in told.runs) else 0


def top(watch: Watch, *, interval: float = 1.0) -> int:
    """Show the same again and again until q, Ctrl-C or a signal; 0, or 2 if there is no terminal."""
    console = Console(highlight=False)
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        print("tierd: top needs a terminal; `tierd --once` prints the same, once", file=sys.stderr)
        return 2
    history, drawn = History(), marks(console.encoding)
    with _keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            due = time.monotonic() + interval
            shown = _look(watch, history, drawn)
            event = "redraw"
            while event == "redraw":
                live.update(shown, refresh=True)
                event = keyboard.wait(due)
            if event == "leave":
                return 0


def _look(watch: Watch, history: History, drawn: Marks) -> RenderableType:
    try:
        view = watch.view()
    except TelemetryError as error:  # it may come back
        return Text(str(error), "bold red")
    history.add(view)
    return _Screenful(view, history, drawn)


class _Screenful:
    """As many lines as the terminal has at the moment it is drawn; what does not fit is cut from the bottom."""

    def __init__(self, view: View, history: History, drawn: Marks) -> None:
        self._told, self._history, self._drawn = status(view), history, drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        shown = pictured(self._told, width, self._drawn, self._history.of)
        lines = console.render_lines(shown, options.update(height=None), pad=True)
        room = height - 1
        clock = time.strftime("%H:%M:%S", time.localtime(self._told.taken_at))
        cut = f", {len(lines) - room} more lines: make the window taller" if len(lines) > room else ""
        for line in lines[:room]:
            yield from line
            yield Segment.line()
        yield from (Segment.line() for _ in range(room - len(lines)))
        yield Text(f"{clock}  q leaves{cut}", "reverse", no_wrap=True, overflow="crop", end="")


class _Keyboard:
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
def _keyboard() -> Iterator[_Keyboard]:
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
        yield _Keyboard(reading)
    finally:
        with suppress(termios.error):  # a terminal that is gone
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        signal.set_wakeup_fd(waking)
        for one, handler in handlers.items():
            signal.signal(one, handler)
        os.close(reading)
        os.close(writing)
