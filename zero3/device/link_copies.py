"""Copies between a device with memory of its own and the pinned arena: the only place where bytes cross the link.

Each direction has a stream of its own, so that both run at once, beside compute. A copy waits, on its stream, for the
events it is told of; whoever needs its bytes waits for the event it returns: compute by ``hold_compute``, the CPU by
the event's ``wait``. How long copies take the device itself says, by timed events that are looked at when they have
come, and never waited for.
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
    """What has gone one way since the start, and the device's seconds for it."""

    bytes: int = 0
    copies: int = 0
    busy_seconds: float = 0.0


class _Link:
    """One direction."""

    def __init__(self, stream: Stream, track: Literal["h2d", "d2h"]) -> None:
        self.stream = stream
        self.track = track
        self.nbytes = 0
        self.copies = 0
        self.busy = 0.0
        self.under_way: deque[tuple[int, Event, Event]] = deque()  # bytes, beginning and end


class Copies:
    """Queues copies, and counts and times those that have ended. Any thread may ask, and copy."""

    def __init__(self, streams: Streams, stalls: StallClock) -> None:
        self._stalls = stalls
        self._lock = threading.Lock()
        self._to_device = _Link(streams.fetch, "h2d")
        self._to_host = _Link(streams.offload, "d2h")

    def to_device(
        self, target: Tensor, source: Tensor, *, after: Iterable[Event] = (), kind: str = "copy"
    ) -> Event:
        """Copy the bytes of ``source``, in pinned memory, to ``target``; both flat, and of one dtype and size.

        ``after`` is what must be over before ``target`` is written to. Until the event that is returned has come, the
        CPU must not change ``source``. ``kind`` says in a trace what they are.
        """
        return self._copy(self._to_device, target, source, after, kind)

    def to_host(
        self, target: Tensor, source: Tensor, *, after: Iterable[Event] = (), kind: str = "copy"
    ) -> Event:
        """Copy the bytes of ``source``, on the device, to ``target`` in pinned memory.

        ``after`` is what must be over before ``source`` is read, or ``target`` written to.
        """
        return self._copy(self._to_host, target, source, after, kind)

    def hold_compute(self, event: Event, cause: str) -> None:
        """What the calling thread lets the device compute from now on runs after ``event``; ``cause`` names its bytes.

        The CPU does not wait, and the copies behind that one are not waited for.
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
        # One after the other: two threads' events and copies must not mix on the stream.
        with self._lock:
            for event in after:
                link.stream.wait_for(event)
            began = link.stream.record(timed=True)
            with link.stream.running():
                # Does not hold the CPU, because the host side lies in the pinned arena. Torch did not allocate that
                # memory and does not know who uses it: only ``ended`` tells when either side may be changed or freed.
                target.copy_(source, non_blocking=True)
            ended = link.stream.record(timed=True)
            link.under_way.append((nbytes, began, ended))
            _count(link)
        self._stalls.timeline.queued(link.track, kind, began, ended, bytes=nbytes)
        return ended


def _count(link: _Link) -> None:
    """Count what has ended by now."""
    # A stream runs its copies in order: behind one that has not ended, none has.
    while link.under_way and link.under_way[0][2].done():
        nbytes, began, ended = link.under_way.popleft()
        link.nbytes += nbytes
        link.copies += 1
        link.busy += ended.seconds_since(began)
