"""``tierd --once`` and ``tierd top``: the runs of this node in a terminal, read from their pages without a server."""

from __future__ import annotations

import os
import sys
import time

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from service.formatting import counted, plain
from service.history import INTERVAL, History
from service.responses.status import Status, status
from service.terminal.keyboard import keyboard
from service.terminal.rendering import Marks, marks, pictured
from service.view import View
from service.watch import Watch
from tiering.telemetry import TelemetryError


def once(view: View, *, run: str | None = None, json: bool = False) -> int:
    """Print what the runs do now: 0, or 1 if one of them is degraded, has failed or was killed.

    Of ``run`` alone, an id or a name; 2 where nothing here has it.
    """
    told = _told(view, run)
    if run is not None and not told.runs:
        print(f"tierd: {_nothing_of(run, view)}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    try:
        if json:
            print(told.model_dump_json(), flush=True)
        else:
            console.print(pictured(told, console.width, marks(console.encoding)))
    except OSError as error:
        # Nor could Python write the rest, which it tries to at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            print(f"tierd: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    return 1 if any(one.state != "training" for one in told.runs) else 0


def top(watch: Watch, *, run: str | None = None, interval: float = 1.0) -> int:
    """Show the same again and again until q, Ctrl-C or a signal; 0, or 2 if there is no terminal."""
    console = Console(highlight=False)
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        print("tierd: top needs a terminal; `tierd --once` prints the same, once", file=sys.stderr)
        return 2
    history, drawn = History(), marks(console.encoding)
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        due, size = 0.0, console.size
        while True:
            now = time.monotonic()
            shown = _look(watch, run, history, drawn)
            # Some terminals and multiplexers send no signal when the size changes.
            if now >= due or size != console.size:
                size, due = console.size, now + interval
                live.update(shown, refresh=True)
            # The history is by the second, however seldom it is shown.
            while (event := keys.wait(min(due, now + INTERVAL))) == "redraw":
                size = console.size
                live.update(shown, refresh=True)
            if event == "leave":
                return 0


def _look(watch: Watch, run: str | None, history: History, drawn: Marks) -> RenderableType:
    try:
        view = watch.view()
    except TelemetryError as error:  # it may come back
        return Text(str(error), "bold red")
    history.add(view)
    told = _told(view, run)
    if run is not None and not told.runs:
        return Text(_nothing_of(run, view))
    return _Screenful(told, history, drawn)


def _told(view: View, run: str | None) -> Status:
    told = status(view)
    if run is not None:
        told.runs = [one for one in told.runs if run in (one.id, one.name)]
    return told


def _nothing_of(run: str, view: View) -> str:
    here = ", ".join(plain(one.id) for one in view.runs) or "none has"
    return f"no run with the id or name {run!r} has a page in {view.directory}; these have: {here}"


class _Screenful:
    """As many lines as the terminal has at the moment it is drawn; what does not fit is cut from the bottom."""

    def __init__(self, told: Status, history: History, drawn: Marks) -> None:
        self._told, self._history, self._drawn = told, history, drawn

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        shown = pictured(self._told, width, self._drawn, self._history.of)
        lines = console.render_lines(shown, options.update(height=None), pad=True)
        room = height - 1
        clock = time.strftime("%H:%M:%S", time.localtime(self._told.taken_at))
        more = counted(len(lines) - room, "more line")
        cut = f", {more}: make the window taller" if len(lines) > room else ""
        for line in lines[:room]:
            yield from line
            yield Segment.line()
        yield from (Segment.line() for _ in range(room - len(lines)))
        yield Text(f"{clock}  q leaves{cut}", "reverse", no_wrap=True, overflow="crop", end="")
