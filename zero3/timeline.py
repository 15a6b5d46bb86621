"""What happens when: spans on the clock of the I/O while a trace is recorded, and seconds of phases and stalls."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tiering.telemetry import Phase

Track = Literal["step", "compute", "kernel", "fetch", "network", "read", "write", "stall"]

_NOTHING = nullcontext()


@dataclass(slots=True)
class Span:
    """Something that took time, in nanoseconds of CLOCK_MONOTONIC. ``ended`` is 0 while it goes on."""

    track: Track
    name: str
    began: int
    ended: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = time.monotonic_ns()


class Timeline:
    """Spans of any thread, while ``recording``.

    Who marks often, or has to put a name together, asks ``recording`` first: that is all it costs without a trace.
    """

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self._open: defaultdict[tuple[Track, str], list[Span]] = defaultdict(list)

    def start(self) -> None:
        """Record from now on."""
        self.recording = True

    def stop(self) -> list[Span]:
        """Record no more; what was recorded, some of it perhaps not at its end."""
        self.recording = False
        self._open.clear()
        spans, self.spans = self.spans, []
        return spans

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[object]:
        """A block that is a span. ``args`` are shown beside it: bytes, names."""
        return self._add(track, name, args) if self.recording else _NOTHING

    def begin(self, track: Track, name: str, **args: Any) -> None:
        """A span that is no block: it lasts until ``end``, the innermost one of its name first."""
        if self.recording:
            self._open[track, name].append(self._add(track, name, args))

    def end(self, track: Track, name: str, **args: Any) -> None:
        """The end of what ``begin`` began. What had begun before the recording is unknown, and stays so."""
        begun = self._open.get((track, name))
        if begun:
            span = begun.pop()
            span.ended = time.monotonic_ns()
            span.args |= args

    def stalled(self, cause: str, began: int, ended: int) -> None:
        """Compute has waited."""
        if self.recording:
            self.spans.append(Span("stall", cause, began, ended))

    def _add(self, track: Track, name: str, args: dict[str, Any]) -> Span:
        span = Span(track, name, time.monotonic_ns(), args=args)
        self.spans.append(span)
        return span


class PhaseClock:
    """The phase that a run is in, and seconds by phase since the first one began, the one under way included.

    What the program does between the others is "idle"; what it does before the first, "start", is not counted. A phase
    within a phase, as a forward in a backward, is not part of the outer one.
    """

    def __init__(self) -> None:
        self.phase: Phase = "start"
        self.since = time.time()  # Unix time
        self._entered = time.perf_counter()
        self._lock = threading.Lock()
        self._seconds = {"idle": 0.0}  # (lock) without the phase under way

    def enter(self, phase: Phase) -> float:
        """``phase`` begins, and what was before it ends: now, on the clock of perf_counter."""
        with self._lock:
            now = time.perf_counter()
            if self.phase != "start":
                self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + (now - self._entered)
            self.phase, self.since, self._entered = phase, time.time(), now
        return now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase. Any thread may ask; they never fall."""
        with self._lock:
            seconds = dict(self._seconds)
            if self.phase != "start":
                seconds[self.phase] = seconds.get(self.phase, 0.0) + (time.perf_counter() - self._entered)
        return seconds


class StallClock:
    """Seconds that compute waited for bytes, by cause, and by the ``phase`` in which the wait began.

    Threads may wait at the same time; a wait within a wait is part of the outer one, and of its cause. A wait counts
    while it goes on: who watches from another thread sees a long one grow, not appear when it is over.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.phase = "idle"
        self.timeline = timeline
        self._lock = threading.Lock()
        self._ended: dict[tuple[str, str], int] = {}  # (lock) nanoseconds by phase and cause
        self._under_way: dict[
            int, tuple[tuple[str, str], int]
        ] = {}  # (lock) by thread: phase and cause, beginning

    @contextmanager
    def waiting_for(self, cause: str) -> Iterator[None]:
        """A block in which compute waits."""
        thread = threading.get_ident()
        if thread in self._under_way:
            yield
            return
        began = time.monotonic_ns()
        try:
            with self._lock:
                self._under_way[thread] = (self.phase, cause), began
            yield
        finally:
            self.timeline.stalled(cause, began, self._end(thread))

    def _end(self, thread: int) -> int:
        with self._lock:
            ended = time.monotonic_ns()  # asked under the lock: whoever asked before it has counted less
            if wait := self._under_way.pop(thread, None):  # None if an interrupt came before it began
                key, began = wait
                self._ended[key] = self._ended.get(key, 0) + ended - began
        return ended

    def by_phase(self) -> dict[str, dict[str, float]]:
        """Seconds so far by phase, and there by cause, those of waits under way included. They never fall."""
        with self._lock:
            waited = Counter(self._ended)
            now = time.monotonic_ns()
            for key, began in self._under_way.values():
                waited[key] += now - began
        phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (phase, cause), nanoseconds in waited.items():
            phases[phase][cause] = nanoseconds / 1e9
        return dict(phases)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by cause."""
        return by_cause(self.by_phase())

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def by_cause(phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds by cause, of all phases."""
    causes: defaultdict[str, float] = defaultdict(float)
    for waits in phases.values():
        for cause, waited in waits.items():
            causes[cause] += waited
    return dict(causes)
