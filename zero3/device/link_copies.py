"""Copies between a device with its own memory and the pinned arena. All bytes that cross the link go through here.

Each direction has its own stream, so that both directions run at the same time, and in parallel with compute. A copy
waits on its stream for given events, and returns an event. Users of the bytes wait for this event: compute by
``hold_compute``, the CPU by the event's ``wait``. Timed events measure the duration of copies on the device. No code
waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from tiering.telemetry import COPIES_OF
from zero3.device.streams import Event, Stream, Streams
from zero3.device.timeline import StallClock


@dataclass(frozen=True)
class LinkStats:
    """The copies in one direction since the start, and the seconds that the device spent on them."""

    bytes: int = 0
    copies: int = 0
    busy_seconds: float = 0.0


class _Link:
    """One direction of the link."""

    def __init__(self, stream: Stream, track: Literal["h2d", "d2h"]) -> None:
        self.stream = stream
        self.track = track
        self.nbytes = 0
        self.copies = 0
        self.busy = 0.0
        self.under_way: deque[tuple[int, Event, Event]] = deque()  # bytes, begin and end


class Copies:
    """Queues copies, and counts and times those that have ended. Any thread may call it."""

    def __init__(self, streams: Streams, stalls: StallClock) -> None:
        self._stalls = stalls
        self._lock = threading.Lock()
        self._to_device = _Link(streams.fetch, "h2d")
        self._to_host = _Link(streams.offload, "d2h")

    def to_device(
        self, target: Tensor, source: Tensor, *, after: Iterable[Event] = (), kind: str = "copy"
    ) -> Event:
        """Copy ``source``, in pinned memory, to ``target``; both are flat and have one dtype and size.

        The copy begins after the events in ``after``, such as the last use of ``target``. Until the returned event is
        done, the CPU must not change ``source``. ``kind`` names the bytes in a trace.
        """
        return self._copy(self._to_device, target, source, after, kind)

    def to_host(
        self, target: Tensor, source: Tensor, *, after: Iterable[Event] = (), kind: str = "copy"
    ) -> Event:
        """Copy ``source``, on the device, to ``target`` in pinned memory, after the events in ``after``."""
        return self._copy(self._to_host, target, source, after, kind)

    def hold_compute(self, event: Event, cause: str) -> None:
        """Make compute that the calling thread queues from now on wait for ``event``; ``cause`` names its bytes.

        The CPU does not wait, and compute does not wait for later copies.
        """
        # Kernels that are queued after an event has come see its bytes, so no wait is needed then.
        if not event.done():
            self._stalls.hold(event, COPIES_OF + cause)

    def stats(self) -> dict[str, LinkStats]:
        """Both directions: ``h2d`` to the device, ``d2h`` from it."""
        with self._lock:
            links = self._to_device, self._to_host
            for link in links:
                _count(link)
            return {link.track: LinkStats(link.nbytes, link.copies, link.busy) for link in links}

    def _copy(self, link: _Link, target: Tensor, source: Tensor, after: Iterable[Event], kind: str) -> Event:
        assert target.dtype is source.dtype and target.numel() == source.numel()
        nbytes = target.numel() * target.element_size()
        # With the lock: events and copies of two threads must not mix on the stream.
        with self._lock:
            for event in after:
                link.stream.wait_for(event)
            start = link.stream.record(timed=True)
            with link.stream.running():
                # The CPU does not wait here if the host side is pinned. Torch did not allocate that memory and does
                # not track its use: both sides may be changed or freed only after ``end``.
                target.copy_(source, non_blocking=True)
            end = link.stream.record(timed=True)
            link.under_way.append((nbytes, start, end))
            _count(link)
        self._stalls.timeline.add_device_span(link.track, kind, start, end, bytes=nbytes)
        return end


def _count(link: _Link) -> None:
    """Count the copies that have ended."""
    # A stream runs its copies in order: behind a copy that has not ended, none has ended.
    while link.under_way and link.under_way[0][2].done():
        nbytes, start, end = link.under_way.popleft()
        link.nbytes += nbytes
        link.copies += 1
        link.busy += end.seconds_since(start)
