"""What happens when: spans on the clock of the I/O while a trace is recorded, and seconds of phases and stalls.

Note [Stalls and phases on a GPU]
    The CPU tells a GPU what to compute and runs ahead of it, so that it may wait long for bytes without any harm: as
    long as the GPU has something left to do. And the GPU waits for a copy while the CPU does not. So a stall there is
    time on the GPU's own clock: what lies on the stream that computes between two timed events, one behind all that it
    was told before the wait, one behind the wait. Of a wait of the CPU that is the part in which the GPU ran dry; of a
    wait on the stream itself, for a copy or a collective, all of it. Phases are timed in the same way: the GPU is in
    one for as long as it does what it was told in it, or has nothing to do. Events are looked at when they have come
    and never waited for, so that a stall, and the seconds of a phase, may be told a moment late.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from tiering.telemetry import Phase
from zero3.device.streams import Event, Streams

Track = Literal[
    "step", "compute", "kernel", "fetch", "network", "read", "write", "h2d", "d2h", "stall", "wait"
]

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


@dataclass(slots=True)
class DeviceSpan:
    """Something that took time on a device: what lies between two timed events."""

    track: Track
    name: str
    began: Event
    ended: Event
    args: dict[str, Any]


class Timeline:
    """Spans of any thread, while ``recording``.

    Who marks often, or has to put a name together, asks ``recording`` first: that is all it costs without a trace.
    """

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self.on_device: list[DeviceSpan] = []
        self._open: defaultdict[tuple[Track, str], list[Span]] = defaultdict(list)

    def start(self) -> None:
        """Record from now on."""
        self.recording = True

    def stop(self) -> tuple[list[Span], list[DeviceSpan]]:
        """Record no more; what was recorded, some of it perhaps not at its end."""
        self.recording = False
        self._open.clear()
        spans, self.spans = self.spans, []
        on_device, self.on_device = self.on_device, []
        return spans, on_device

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

    def waited(self, track: Track, cause: str, began: int, ended: int) -> None:
        """The CPU has waited."""
        if self.recording:
            self.spans.append(Span(track, cause, began, ended))

    def queued(self, track: Track, name: str, began: Event, ended: Event, **args: Any) -> None:
        """A device was told something that lies between these timed events."""
        if self.recording:
            self.on_device.append(DeviceSpan(track, name, began, ended, args))

    def _add(self, track: Track, name: str, args: dict[str, Any]) -> Span:
        span = Span(track, name, time.monotonic_ns(), args=args)
        self.spans.append(span)
        return span


class PhaseClock:
    """The phase that a run is in, and seconds by phase since the first one began, the one under way included.

    What the program does between the others is "idle"; what it does before the first, "start", is not counted. A phase
    within a phase, as a forward in a backward, is not part of the outer one. With ``streams`` the phase is still the
    program's, but seconds are the device's, as far as it has come to the end of one.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self.phase: Phase = "start"
        self.since = time.time()  # Unix time
        self._streams = streams
        self._entered = time.perf_counter()
        self._lock = threading.Lock()
        self._seconds = defaultdict[str, float](float, idle=0.0)  # (lock) without the phase under way
        self._reached: Event | None = None  # (lock) the last beginning that the device has come to
        # (lock) phases that the device has yet to end, and their ends
        self._ahead: deque[tuple[Phase, Event]] = deque()

    def enter(self, phase: Phase) -> float:
        """``phase`` begins, and what was before it ends: now, on the clock of perf_counter."""
        event = None if self._streams is None else self._streams.compute.record(timed=True)
        with self._lock:
            now = time.perf_counter()
            if event is not None:
                self._ahead.append((self.phase, event))
                self._look()
            elif self.phase != "start":
                self._seconds[self.phase] += now - self._entered
            self.phase, self.since, self._entered = phase, time.time(), now
        return now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase. Any thread may ask; they never fall."""
        with self._lock:
            self._look()
            seconds = self._seconds.copy()
            if self.phase != "start" and self._streams is None:
                seconds[self.phase] += time.perf_counter() - self._entered
        return dict(seconds)

    def _look(self) -> None:
        """Count what the device has ended; with the lock."""
        # In their order: the seconds of a phase count when those of all phases before it do.
        while self._ahead and self._ahead[0][1].done():
            phase, ended = self._ahead.popleft()
            if self._reached is not None:
                self._seconds[phase] += ended.seconds_since(self._reached)
            self._reached = ended


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait of compute: on the CPU's clock, or where a device computes, between two events there."""

    phase: str
    cause: str
    began: int  # nanoseconds
    reached: Event | None = None  # the device has done all that it was told before
    resumed: Event | None = None  # and has waited; None while the CPU waits
    dry: int | None = None  # when the device was first seen to have reached it
    nanoseconds: int = 0  # as far as they are known

    def over(self, now: int) -> bool:
        """Count what there is of it at ``now``; whether that is all."""
        if self.reached is None:
            self.nanoseconds = now - self.began
            return False
        if self.resumed is not None and self.resumed.done():
            took = round(1e9 * self.resumed.seconds_since(self.reached))
            self.nanoseconds = max(self.nanoseconds, took)  # two clocks: what was told does not fall
            return True
        if self.dry is None and self.reached.done():
            self.dry = time.monotonic_ns()
        if self.dry is not None:
            self.nanoseconds = max(self.nanoseconds, now - self.dry)
        return False


class StallClock:
    """Seconds that compute waited for bytes, by cause, and by the ``phase`` in which the wait began.

    Threads may wait at the same time; a wait within a wait is part of the outer one, and of its cause. A wait counts
    while it goes on: who watches from another thread sees a long one grow, not appear when it is over. ``streams`` are
    those of a device that computes beside the CPU: see Note [Stalls and phases on a GPU].
    """

    def __init__(self, timeline: Timeline, streams: Streams | None = None) -> None:
        self.phase = "idle"
        self.timeline = timeline
        self.streams = streams
        self._lock = threading.Lock()
        self._ended: Counter[tuple[str, str]] = Counter()  # (lock) nanoseconds by phase and cause
        self._under_way: dict[int, _Wait] = {}  # (lock) by thread: those in which the CPU waits
        self._queued: deque[_Wait] = deque()  # (lock) those whose end the device has yet to reach

    @contextmanager
    def waiting_for(self, cause: str) -> Iterator[None]:
        """A block in which compute waits."""
        thread = threading.get_ident()
        # Without the lock: no other thread adds or removes the entry of this one.
        if thread in self._under_way:
            yield
            return
        try:
            self._begin(thread, cause)
            yield
        finally:
            self._end(thread)

    def hold(self, event: Event, cause: str) -> None:
        """What the calling thread tells the device to compute from now on waits there for ``event``.

        Within another wait it is told for itself, and that one goes on behind it.
        """
        assert self.streams is not None
        compute = self.streams.compute
        # In this order on the stream: ``reached`` comes when the device has nothing else to do, ``resumed`` when
        # ``event`` has come. The time between them is the stall.
        reached = compute.record(timed=True)
        compute.wait_for(event)
        resumed = compute.record(timed=True)
        held = _Wait(self.phase, cause, time.monotonic_ns(), reached, resumed)
        with self._lock:
            thread = threading.get_ident()
            if around := self._under_way.get(thread):
                self._queue(around, reached)
                self._under_way[thread] = _Wait(around.phase, around.cause, held.began, resumed)
            self._queue(held, resumed)

    def by_phase(self) -> dict[str, dict[str, float]]:
        """Seconds so far by phase, and there by cause, those of waits under way included. They never fall."""
        with self._lock:
            # First, and under the same lock: a wait that is over moves from ``_queued`` to ``_ended``, and counts once.
            self._look()
            waited = Counter(self._ended)
            now = time.monotonic_ns()
            for wait in (*self._queued, *self._under_way.values()):
                wait.over(now)
                waited[wait.phase, wait.cause] += wait.nanoseconds
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

    def _begin(self, thread: int, cause: str) -> None:
        reached = None if self.streams is None else self.streams.compute.record(timed=True)
        with self._lock:
            self._under_way[thread] = _Wait(self.phase, cause, time.monotonic_ns(), reached)

    def _end(self, thread: int) -> None:
        resumed = None if self.streams is None else self.streams.compute.record(timed=True)
        with self._lock:
            wait = self._under_way.pop(thread, None)
            if wait is None:  # an interrupt came before it began
                return
            ended = time.monotonic_ns()  # asked under the lock: whoever asked before it has counted less
            if resumed is None:
                self._ended[wait.phase, wait.cause] += ended - wait.began
            else:
                self._queue(wait, resumed)
        self.timeline.waited("stall" if resumed is None else "wait", wait.cause, wait.began, ended)

    def _queue(self, wait: _Wait, resumed: Event) -> None:
        """The CPU has said all there is to ``wait``; with the lock."""
        wait.resumed = resumed
        self._queued.append(wait)
        assert wait.reached is not None
        self.timeline.queued("stall", wait.cause, wait.reached, resumed)
        self._look()

    def _look(self) -> None:
        """Count what is over on the device; with the lock."""
        now = time.monotonic_ns()
        while self._queued and self._queued[0].over(now):
            wait = self._queued.popleft()
            self._ended[wait.phase, wait.cause] += wait.nanoseconds


def by_cause(phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds by cause, of all phases."""
    causes: defaultdict[str, float] = defaultdict(float)
    for waits in phases.values():
        for cause, waited in waits.items():
            causes[cause] += waited
    return dict(causes)
