"""``tierd --once`` and ``tierd top``: show the runs of this node in a terminal. They need no server."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from service.formatting import counted, plain
from service.history import INTERVAL, History
from service.responses.status import Status, status
from service.terminal.keyboard import keyboard
from service.terminal.rendering import Symbols, rendered, symbols_for
from service.view import View
from service.watch import Watch
from tiering.telemetry import TelemetryError


def once(view: View, *, run: str | None = None, form: Literal["text", "json", "prom"] = "text") -> int:
    """Print the state of the runs, or of those with the id or name ``run``, in the given form. Returns the exit status:

    0 if all are training, 1 if one is stuck, is degraded or has ended, or if a node does not answer, 2 if no run has
    this id or name.
    """
    selected = _status(view, run)
    if run is not None and not selected.runs:
        print(f"tierd: {_no_such_run(run, view)}", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    try:
        if form == "text":
            console.print(rendered(selected, console.width, symbols_for(console.encoding)))
        else:
            # Both formats are UTF-8 in any locale: with another encoding, readers refuse the whole output.
            text = f"{selected.model_dump_json()}\n".encode() if form == "json" else _metrics(view, run)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
    except OSError as error:
        # Python flushes the rest at exit; send it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # the reader, for example `head`, has closed the pipe
            print(f"tierd: standard output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    is_well = all(run_status.state == "training" for run_status in selected.runs)
    return 0 if is_well and all(node.answers for node in selected.nodes) else 1


def _metrics(view: View, run: str | None) -> bytes:
    # prometheus_client takes longer to load than the rest.
    from service.metrics import render_runs

    if run is not None:
        runs = tuple(candidate for candidate in view.runs if run in (candidate.id, candidate.name))
        view = replace(view, runs=runs, closed=())
    return render_runs(view)


def top(watch: Watch, *, run: str | None = None, interval: float = 1.0) -> int:
    """Show the runs until q, Ctrl-C or a signal. Returns the exit status: 0, or 2 if there is no terminal."""
    console = Console(highlight=False)
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        print("tierd: top needs a terminal; `tierd --once` prints the same without one", file=sys.stderr)
        return 2
    history, symbols = History(), symbols_for(console.encoding)
    with keyboard() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        due, size = 0.0, console.size
        while True:
            now = time.monotonic()
            screen = _screen(watch, run, history, symbols)
            # Some terminals and multiplexers send no signal when the size changes.
            if now >= due or size != console.size:
                size, due = console.size, now + interval
                live.update(screen, refresh=True)
            # The history has one entry per second, whatever the interval.
            while (event := keys.wait(min(due, now + INTERVAL))) == "redraw":
                size = console.size
                live.update(screen, refresh=True)
            if event == "quit":
                return 0


def _screen(watch: Watch, run: str | None, history: History, symbols: Symbols) -> RenderableType:
    try:
        view = watch.view()
    except TelemetryError as error:  # it may be temporary
        return Text(str(error), "bold red")
    history.add(view)
    selected = _status(view, run)
    if run is not None and not selected.runs:
        return Text(_no_such_run(run, view))
    return _Screen(selected, history, symbols)


def _status(view: View, run: str | None) -> Status:
    selected = status(view)
    if run is not None:
        selected.runs = [candidate for candidate in selected.runs if run in (candidate.id, candidate.name)]
    return selected


def _no_such_run(run: str, view: View) -> str:
    ids = ", ".join(plain(present.id) for present in view.runs) or "none"
    return f"no run with the id or name {run!r} has a status file in {view.directory}; runs there: {ids}"


class _Screen:
    """The status, cut at the bottom to the number of lines that the terminal has when it is drawn."""

    def __init__(self, status: Status, history: History, symbols: Symbols) -> None:
        self._status, self._history, self._symbols = status, history, symbols

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        content = rendered(self._status, width, self._symbols, self._history.of)
        lines = console.render_lines(content, options.update(height=None), pad=True)
        rows = height - 1
        clock = time.strftime("%H:%M:%S", time.localtime(self._status.taken_at))
        more = counted(len(lines) - rows, "more line")
        hint = f", {more}: make the window taller" if len(lines) > rows else ""
        for line in lines[:rows]:
            yield from line
            yield Segment.line()
        yield from (Segment.line() for _ in range(rows - len(lines)))
        yield Text(f"{clock}  q quits{hint}", "reverse", no_wrap=True, overflow="crop", end="")
