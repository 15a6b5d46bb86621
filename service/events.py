"""Server-sent events: the status, pushed to whoever keeps listening."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.view import View
from service.watch import Watch
from tiering.telemetry import TelemetryError

MOST_SUBSCRIBERS = 64
PATIENCE = 15.0  # seconds after which a proxy may take a silent connection for dead: a comment keeps it
STUCK = 30.0  # seconds in which a subscriber must take something of what is waiting for it
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]


class Events:
    """Everybody who listens. Each takes what is newest when it is ready for it: nothing queues up for a slow one.

    ``render`` makes the data of an event; its bytes are made once per View. A subscriber that takes nothing for
    ``stuck`` seconds is cut off. Belongs to one event loop.
    """

    def __init__(
        self,
        watch: Watch,
        render: Callable[[View], bytes],
        *,
        most: int = MOST_SUBSCRIBERS,
        patience: float = PATIENCE,
        stuck: float = STUCK,
    ) -> None:
        self._watch, self._render = watch, render
        self._most, self._patience, self._stuck = most, patience, stuck
        self._departures: set[asyncio.Future[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._departures)

    @property
    def full(self) -> bool:
        """Whether one more is too many."""
        return self._closed or len(self) >= self._most

    def close(self) -> None:
        """End all streams at once, and let nobody in any more: a server that shuts down waits for them."""
        self._closed = True
        for departure in self._departures:
            departure.cancel()

    async def tell(self, interval: float, receive: Receive, send: Send) -> None:
        """Serve one subscriber until it leaves, or ``close``. Raises TimeoutError where it is stuck."""
        departure = asyncio.ensure_future(_departure(receive))
        self._departures.add(departure)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._tell_until(departure, interval, send)
            if departure.cancelled():
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._departures.discard(departure)
            departure.cancel()

    async def _tell_until(self, departure: asyncio.Future[None], interval: float, send: Send) -> None:
        told: int | str | None = None
        told_at = due = time.monotonic()
        while not departure.done():
            news, event = await self._newest()
            if news == told:
                event = b": nothing new\n\n" if time.monotonic() - told_at >= self._patience else b""
            if event:
                told, told_at = news, time.monotonic()
                body = {"type": "http.response.body", "body": event, "more_body": True}
                await asyncio.wait_for(send(body), self._stuck)
            due = max(due + interval, time.monotonic())
            await asyncio.wait([departure], timeout=due - time.monotonic())

    async def _newest(self) -> tuple[int | str, bytes]:
        """What tells this event from others, and its bytes."""
        try:
            view = await self._watch.now()
        except TelemetryError as error:
            problem = json.dumps({"detail": str(error)})
            return problem, _event("problem", problem.encode())
        return view.changes, view.once("event", lambda: _event("status", self._render(view)))


class Subscription(Response):
    """The response that lasts."""

    media_type = "text/event-stream"

    def __init__(self, events: Events, interval: float) -> None:
        super().__init__()
        self._events, self._interval = events, interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._events.tell(self._interval, receive, send)
        except TimeoutError:
            # What a closed connection still has to send would wait for its reader as long as that lives.
            abort = scope.get("extensions", {}).get("tierd.abort", lambda: None)
            abort()
            await asyncio.sleep(0)


async def _departure(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
