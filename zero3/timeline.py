"""What happens when: spans on the clock of the I/O, kept while a trace is recorded, and the seconds of stalls."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Track = Literal["compute", "kernel", "fetch", "read", "write", "stall"]

_NOTHING = nullcontext()


@dataclass(slots=True)
class Span:
    """Something that took time, in nanoseconds of CLOCK_MONOTONIC. ``ended`` is 0 while it goes on."""

    track: Track
    name: str
    began: int
    ended: int = 0
    args: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """It is over."""
        self.ended = time.monotonic_ns()


class Timeline:
    """Spans of any thread, while ``recording``."""

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[object]:
        """A block that is a span. ``args`` are shown beside it: bytes, names."""
        return self.begin(track, name, **args) if self.recording else _NOTHING

    def begin(self, track: Track, name: str, **args: Any) -> Span:
        """A span that begins now, until its ``end`` is called. Only while ``recording``."""
        span = Span(track, name, time.monotonic_ns(), args=args)
        self.spans.append(span)
        return span


class StallClock:
    """Seconds that compute waited for bytes, by cause."""

    def __init__(self, timeline: Timeline) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._timeline = timeline

    @contextmanager
    def waiting_for(self, cause: str) -> Iterator[None]:
        """A block in which compute waits."""
        began = time.monotonic_ns()
        try:
            yield
        finally:
            ended = time.monotonic_ns()
            self.seconds[cause] += (ended - began) / 1e9
            if self._timeline.recording:
                self._timeline.spans.append(Span("stall", cause, began, ended))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
