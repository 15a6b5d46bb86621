"""Progress of a run on stderr: a live line on a terminal, two lines per phase elsewhere.

A refresh takes about 0.1 ms of the CPU time that is being measured. So it is one text, drawn at most ten times a
second, and only when a sample arrives.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tiering.tierbench.display import figures
from tiering.tierbench.display.sparkline import BLOCKS, levels, spark
from tiering.tierbench.result import Sample

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

REFRESH_SECONDS = 0.1
_BAR = 16
_SPARK = 24


class Progress:
    """Shows one phase after another until the block ends; nothing if ``quiet``. ``console`` writes to stderr."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._console: Console | None = None
        self._live: Live | None = None
        self._phase: _Phase | None = None
        if not quiet:
            from rich.console import Console

            self._console = console or Console(stderr=True)

    def __enter__(self) -> Self:
        console = self._console
        if console is not None and console.is_terminal and not console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str, seconds: float | None) -> Callable[[Sample, float], None]:
        """Begin a phase and end the previous one. Call the returned function with each sample."""
        self._end()
        phase = self._phase = _Phase(name)
        self._say(f"{name}{f', {seconds:g} s' if seconds is not None else ''} ...")
        last_draw: float | None = None

        def watch(sample: Sample, done: float) -> None:
            nonlocal last_draw
            phase.add(sample)
            now = self._clock()
            if self._live is not None and (last_draw is None or now - last_draw >= REFRESH_SECONDS):
                last_draw = now
                self._draw(phase, done)

        return watch

    def announce(self, text: str) -> None:
        """Print a line that stays."""
        if self._console is None:
            return
        try:
            self._console.print(f"tierbench: {text}", markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich raises SystemExit if the pipe is closed
            # The results matter more than progress: drop it, and send the buffered rest to /dev/null.
            self._console = None
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def _end(self) -> None:
        if self._phase is not None:
            self._say(f"{self._phase.name}: {self._phase.mean()}")
            self._phase = None

    def _say(self, text: str) -> None:
        """Print a line, unless a live line shows the phase."""
        if self._live is None:
            self.announce(text)

    def _draw(self, phase: _Phase, done: float) -> None:
        from rich.text import Text

        assert self._console is not None and self._live is not None
        characters = levels(self._console.encoding)
        complete, remaining = ("━", "╌") if characters is BLOCKS else ("#", "-")
        reached = round(_BAR * min(1.0, done))
        bar = complete * reached + remaining * (_BAR - reached)
        text = f"{phase.name:<12}  {bar}  {done:4.0%}  {phase.latest()}  "
        room = max(0, min(_SPARK, self._console.width - len(text)))
        text += spark(list(phase.recent)[-room:], room, characters)
        self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


class _Phase:
    """The bytes of a phase since its start, and its latest samples."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.recent: deque[float] = deque(maxlen=_SPARK)
        self._at = self._read = self._written = 0.0
        self._last: Sample | None = None

    def add(self, sample: Sample) -> None:
        took = sample.at - self._at
        self._at = sample.at
        self._read += sample.read * took
        self._written += sample.write * took
        self._last = sample
        self.recent.append(sample.rate)

    def latest(self) -> str:
        return "" if self._last is None else _rates(self._last.read, self._last.write)

    def mean(self) -> str:
        return _rates(self._read / self._at, self._written / self._at) if self._at else "nothing was moved"


def _rates(read: float, write: float) -> str:
    if read and write:
        return f"{figures.gb(read)} read + {figures.gb(write)} written GB/s"
    return f"{figures.gb(read + write)} GB/s"
