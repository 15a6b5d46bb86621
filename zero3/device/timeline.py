"""Times of a run: spans on the clock of the I/O while a trace is recorded, and seconds of phases and stalls.

Note [Stalls and phases on a GPU]
    The CPU queues work for a GPU and runs ahead of it. A wait of the CPU for bytes therefore costs nothing while the
    GPU has queued work, and the GPU can wait for a copy while the CPU does not. So a stall on a GPU is measured on the
    GPU's clock, between two timed events on the compute stream: one behind all work queued before the wait, and one
    behind the wait. If the CPU waits, this is the part of the wait in which the GPU had no work. If the stream itself
    waits, for a copy or a collective, it is the whole wait. Phases are timed in the same way: the GPU is in a phase
    while it does the work that was queued in the phase, and while it has no work. No code waits for these events, so a
    stall and the seconds of a phase may be counted slightly late.
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
    """An activity on the CPU, in nanoseconds of CLOCK_MONOTONIC. ``end`` is 0 while the activity lasts."""

    track: Track
    name: str
    start: int
    end: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end = time.monotonic_ns()


@dataclass(slots=True)
class DeviceSpan:
    """An activity on a device, between two timed events."""

    track: Track
    name: str
    start: Event
    end: Event
    args: dict[str, Any]


class Timeline:
    """Spans of all threads, while ``recording``.

    Code that adds spans often, or has to build their names, checks ``recording`` first. Without a trace, this check is
    the only cost.
    """

    def __init__(self) -> None:
        self.recording = False
        self.spans: list[Span] = []
        self.on_device: list[DeviceSpan] = []
        self._open: defaultdict[tuple[Track, str], list[Span]] = defaultdict(list)

    def start(self) -> None:
        """Begin to record."""
        self.recording = True

    def stop(self) -> tuple[list[Span], list[DeviceSpan]]:
        """Stop recording. Returns the recorded spans; some of them may not have ended."""
        self.recording = False
        self._open.clear()
        spans, self.spans = self.spans, []
        on_device, self.on_device = self.on_device, []
        return spans, on_device

    def span(self, track: Track, name: str, **args: Any) -> AbstractContextManager[object]:
        """A context manager that records its block as a span. A trace shows ``args``, such as bytes and names."""
        return self._add(track, name, args) if self.recording else _NOTHING

    def begin(self, track: Track, name: str, **args: Any) -> None:
        """Begin a span that lasts until ``end``. Of several spans with one name, the last one ends first."""
        if self.recording:
            self._open[track, name].append(self._add(track, name, args))

    def end(self, track: Track, name: str, **args: Any) -> None:
        """End the span that ``begin`` began. A span that began before the recording is not recorded."""
        open_spans = self._open.get((track, name))
        if open_spans:
            span = open_spans.pop()
            span.end = time.monotonic_ns()
            span.args |= args

    def add_wait(self, track: Track, cause: str, start: int, end: int) -> None:
        """Add an activity of the CPU that has ended, such as a wait, in nanoseconds of CLOCK_MONOTONIC."""
        if self.recording:
            self.spans.append(Span(track, cause, start, end))

    def add_device_span(self, track: Track, name: str, start: Event, end: Event, **args: Any) -> None:
        """Add queued work of a device, between two timed events of its stream."""
        if self.recording:
            self.on_device.append(DeviceSpan(track, name, start, end, args))

    def _add(self, track: Track, name: str, args: dict[str, Any]) -> Span:
        span = Span(track, name, time.monotonic_ns(), args=args)
        self.spans.append(span)
        return span


class PhaseClock:
    """The current phase of a run, and the seconds of each phase since the first one began, including the current one.

    The time between phases is the phase "idle". The time before the first phase, "start", is not counted. A phase
    within another one, such as a forward in a backward, is not part of the outer one. With ``streams``, ``phase`` is
    still the phase of the program, but seconds are measured on the device, and count when the device ends a phase.
    ``stalls`` are counted by phase.
    """

    def __init__(self, streams: Streams | None = None, stalls: StallClock | None = None) -> None:
        self.phase: Phase = "start"
        self.since = time.time()  # Unix time
        self.began: float | None = None  # seconds of perf_counter, when the first phase began
        self._streams = streams
        self._stalls = stalls
        self._entered = time.perf_counter()
        self._lock = threading.Lock()
        self._seconds = defaultdict[str, float](float, idle=0.0)  # (lock) without the current phase
        self._reached: Event | None = None  # (lock) the last begin of a phase that the device has reached
        # (lock) Phases that the device has not ended, with their ends.
        self._ahead: deque[tuple[Phase, Event]] = deque()

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        """Time the block as ``phase``. Afterwards the phase before it continues; after the first phase it is "idle"."""
        before: Phase = "idle" if self.phase == "start" else self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin ``phase``."""
        if self._stalls is not None:
            self._stalls.phase = phase
        event = None if self._streams is None else self._streams.compute.record(timed=True)
        with self._lock:
            now = time.perf_counter()
            if self.began is None:
                self.began = now
            if event is not None:
                self._ahead.append((self.phase, event))
                self._count_ended()
            elif self.phase != "start":
                self._seconds[self.phase] += now - self._entered
            self.phase, self.since, self._entered = phase, time.time(), now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by phase, which never decrease. Any thread may read them."""
        with self._lock:
            self._count_ended()
            seconds = self._seconds.copy()
            if self.phase != "start" and self._streams is None:
                seconds[self.phase] += time.perf_counter() - self._entered
        return dict(seconds)

    def _count_ended(self) -> None:
        """Count the phases that the device has ended. The caller holds the lock."""
        # In order: each phase is measured from the end of the phase before it.
        while self._ahead and self._ahead[0][1].done():
            phase, end = self._ahead.popleft()
            if self._reached is not None:
                self._seconds[phase] += end.seconds_since(self._reached)
            self._reached = end


@dataclass(slots=True, eq=False)
class _Wait:
    """A wait of compute: on the CPU's clock, or, if a device computes, between two events of the device."""

    phase: str
    cause: str
    start: int  # nanoseconds
    reached: Event | None = None  # behind all work that was queued before the wait
    resumed: Event | None = None  # behind the wait; None while the CPU waits
    idle_since: int | None = None  # nanoseconds: when the device was first found to be at ``reached``
    nanoseconds: int = 0  # the duration so far

    def update(self, now: int) -> bool:
        """Set the duration at ``now``. Returns whether the wait has ended."""
        if self.reached is None:
            self.nanoseconds = now - self.start
            return False
        if self.resumed is not None and self.resumed.done():
            duration = round(1e9 * self.resumed.seconds_since(self.reached))
            # The CPU's clock measured the wait before: a published duration must not decrease.
            self.nanoseconds = max(self.nanoseconds, duration)
            return True
        if self.idle_since is None and self.reached.done():
            self.idle_since = time.monotonic_ns()
        if self.idle_since is not None:
            self.nanoseconds = max(self.nanoseconds, now - self.idle_since)
        return False


class StallClock:
    """Seconds for which compute waited for bytes, by cause, and by the ``phase`` in which the wait began.

    Several threads may wait at the same time. A wait within a wait is part of the outer one, and has its cause. A wait
    counts while it lasts, so that another thread sees a long wait grow. ``streams`` are the streams of a device that
    computes: see Note [Stalls and phases on a GPU].
    """

    def __init__(self, timeline: Timeline, streams: Streams | None = None) -> None:
        self.phase = "idle"
        self.timeline = timeline
        self.streams = streams
        self._lock = threading.Lock()
        self._ended: Counter[tuple[str, str]] = Counter()  # (lock) nanoseconds by phase and cause
        self._under_way: dict[int, _Wait] = {}  # (lock) by thread: waits of the CPU
        self._queued: deque[_Wait] = deque()  # (lock) waits whose end the device has not reached

    @contextmanager
    def waiting_for(self, cause: str) -> Iterator[None]:
        """A context manager: compute waits in its block, because of ``cause``."""
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

    def add(self, cause: str, start: int, end: int) -> None:
        """Count a wait that has ended, in nanoseconds of CLOCK_MONOTONIC. Not for a device, which measures its own."""
        assert self.streams is None
        with self._lock:
            self._ended[self.phase, cause] += end - start
        self.timeline.add_wait("stall", cause, start, end)

    def hold(self, event: Event, cause: str) -> None:
        """Make work that the calling thread queues from now on wait on the device for ``event``.

        Within a wait of the CPU, this wait is counted separately, and the outer one continues behind it.
        """
        assert self.streams is not None
        compute = self.streams.compute
        # In this order on the stream: the device passes ``reached`` when it has no other work, and ``resumed`` when
        # ``event`` is done. The time between them is the stall.
        reached = compute.record(timed=True)
        compute.wait_for(event)
        resumed = compute.record(timed=True)
        wait = _Wait(self.phase, cause, time.monotonic_ns(), reached, resumed)
        with self._lock:
            thread = threading.get_ident()
            if around := self._under_way.get(thread):
                self._queue(around, reached)
                self._under_way[thread] = _Wait(around.phase, around.cause, wait.start, resumed)
            self._queue(wait, resumed)

    def by_phase(self) -> dict[str, dict[str, float]]:
        """Seconds so far by phase and cause, including waits that last. They never decrease."""
        with self._lock:
            # Under the same lock, before the sum: a wait that has ended moves from ``_queued`` to ``_ended``, so that
            # it counts once.
            self._count_ended()
            totals = Counter(self._ended)
            now = time.monotonic_ns()
            for wait in (*self._queued, *self._under_way.values()):
                wait.update(now)
                totals[wait.phase, wait.cause] += wait.nanoseconds
        phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (phase, cause), nanoseconds in totals.items():
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
            # Read under the lock: an earlier ``by_phase`` has counted no later time, so the sum does not decrease.
            end = time.monotonic_ns()
            if resumed is None:
                self._ended[wait.phase, wait.cause] += end - wait.start
            else:
                self._queue(wait, resumed)
        self.timeline.add_wait("stall" if resumed is None else "wait", wait.cause, wait.start, end)

    def _queue(self, wait: _Wait, resumed: Event) -> None:
        """``wait`` is completely queued on the device. The caller holds the lock."""
        wait.resumed = resumed
        self._queued.append(wait)
        assert wait.reached is not None
        self.timeline.add_device_span("stall", wait.cause, wait.reached, resumed)
        self._count_ended()

    def _count_ended(self) -> None:
        """Count the waits that have ended on the device. The caller holds the lock."""
        now = time.monotonic_ns()
        while self._queued and self._queued[0].update(now):
            wait = self._queued.popleft()
            self._ended[wait.phase, wait.cause] += wait.nanoseconds


def by_cause(phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Seconds by cause, the sum of all phases."""
    causes: defaultdict[str, float] = defaultdict(float)
    for waits in phases.values():
        for cause, seconds in waits.items():
            causes[cause] += seconds
    return dict(causes)
