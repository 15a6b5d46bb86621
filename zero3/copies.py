"""Copies between a device with memory of its own and the pinned arena: the only place where bytes cross the link.

Each direction has a stream of its own, so that both run at once, beside compute. A copy waits, on its stream, for the
events it is told of; whoever needs its bytes waits for the event it returns: compute by ``hold_compute``, the CPU by
the event's ``wait``. How long copies take, and how long compute stands still for one, the device itself says, by timed
events that are looked at when they have come and never waited for.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from zero3.streams import Event, Stream, Streams
from zero3.timeline import StallClock, by_cause


@dataclass(frozen=True)
class LinkStats:
    """One direction since the start: bytes and copies that were begun, and the device's seconds of those that ended."""

    bytes: int = 0
    copies: int = 0
    busy_seconds: float = 0.0


class _Link:
    """One direction."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.nbytes = 0
        self.copies = 0
        self.busy = 0.0
        self.timed: deque[tuple[Event, Event]] = (
            deque()
        )  # beginning and end of copies whose time is not known yet


class Copies:
    """Queues copies, and counts and times them. Any thread may ask, and copy."""

    def __init__(self, streams: Streams, stalls: StallClock) -> None:
        self._streams = streams
        self._stalls = stalls
        self._lock = threading.Lock()
        self._to_device = _Link(streams.fetch)
        self._to_host = _Link(streams.offload)
        self._held: deque[tuple[tuple[str, str], Event, Event]] = deque()  # phase and cause, reached, resumed
        self._stood: dict[tuple[str, str], float] = {}

    def to_device(self, target: Tensor, source: Tensor, *, after: Iterable[Event] = ()) -> Event:
        """Copy the bytes of ``source``, in pinned memory, to ``target``; both flat, and of one dtype and size.

        ``after`` is what must be over before ``target`` is written to. Until the event that is returned has come, the
        CPU must not change ``source``.
        """
        return self._copy(self._to_device, target, source, after)

    def to_host(self, target: Tensor, source: Tensor, *, after: Iterable[Event] = ()) -> Event:
        """Copy the bytes of ``source``, on the device, to ``target`` in pinned memory.

        ``after`` is what must be over before ``source`` is read, or ``target`` written to.
        """
        return self._copy(self._to_host, target, source, after)

    def hold_compute(self, event: Event, cause: str) -> None:
        """What the calling thread lets the device compute from now on runs after ``event``; ``cause`` names its bytes.

        The CPU does not wait, and the copies behind that one are not waited for.
        """
        if event.done():
            return
        compute = self._streams.compute
        reached = compute.record(timed=True)
        compute.wait_for(event)
        resumed = compute.record(timed=True)
        with self._lock:
            self._held.append(((self._stalls.phase, cause), reached, resumed))
            self._look()

    def stats(self) -> dict[str, LinkStats]:
        """Both directions: ``h2d`` to the device, ``d2h`` from it."""
        with self._lock:
            self._look()
            links = {"h2d": self._to_device, "d2h": self._to_host}
            return {name: LinkStats(link.nbytes, link.copies, link.busy) for name, link in links.items()}

    def stalls_by_phase(self) -> dict[str, dict[str, float]]:
        """Seconds that the device's compute stood still for copies, by phase of the step, and there by cause."""
        with self._lock:
            self._look()
            phases: defaultdict[str, dict[str, float]] = defaultdict(dict)
            for (phase, cause), seconds in self._stood.items():
                phases[phase][cause] = seconds
            return dict(phases)

    def stalls(self) -> dict[str, float]:
        """Seconds that the device's compute stood still for copies, by cause."""
        return by_cause(self.stalls_by_phase())

    def _copy(self, link: _Link, target: Tensor, source: Tensor, after: Iterable[Event]) -> Event:
        assert target.dtype is source.dtype and target.numel() == source.numel()
        # One after the other: two threads' events and copies must not mix on the stream.
        with self._lock:
            for event in after:
                link.stream.wait_for(event)
            begun = link.stream.record(timed=True)
            with link.stream.running():
                target.copy_(source, non_blocking=True)
            ended = link.stream.record(timed=True)
            link.nbytes += target.numel() * target.element_size()
            link.copies += 1
            link.timed.append((begun, ended))
            self._look()
        return ended

    def _look(self) -> None:
        """Count the times that are known by now; with the lock."""
        for link in (self._to_device, self._to_host):
            while link.timed and link.timed[0][1].done():
                begun, ended = link.timed.popleft()
                link.busy += ended.seconds_since(begun)
        while self._held and self._held[0][2].done():
            key, reached, resumed = self._held.popleft()
            self._stood[key] = self._stood.get(key, 0.0) + resumed.seconds_since(reached)
