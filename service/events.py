"""Server-sent events: the status, pushed to subscribers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.compression import STREAM_HEAD, accepts_gzip, part_of_stream
from service.view import View
from service.view_cache import ViewCache
from service.watch import Watch
from tiering.telemetry import TelemetryError

MAX_SUBSCRIBERS = 64  # a few people watch a node; more are a client that opens streams and never closes them
# Proxies close a connection that is silent for longer, so an idle stream sends a comment at this interval.
KEEPALIVE_SECONDS = 15.0
_COMMENT = b": nothing new\n\n"


class Events:
    """The source of events, and the number of subscribers.

    ``render`` makes the data of an event for one run or, for None, all runs; its bytes are made once per View.
    Belongs to one event loop.
    """

    def __init__(
        self,
        watch: Watch,
        cache: ViewCache,
        render: Callable[[View, str | None], bytes],
        *,
        max_subscribers: int = MAX_SUBSCRIBERS,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
    ) -> None:
        self._watch, self._cache, self._render = watch, cache, render
        self._max_subscribers = max_subscribers
        self.keepalive_seconds = keepalive_seconds
        self.subscribers = 0

    @property
    def full(self) -> bool:
        """Whether the limit of subscribers is reached."""
        return self.subscribers >= self._max_subscribers

    async def newest(self, run: str | None, *, zipped: bool = False) -> tuple[int | str, bytes]:
        """The version of the newest event, which changes with its content, and the event's bytes.

        ``zipped``: they are a part of a gzip stream.
        """
        try:
            view = await self._watch.now()
        except TelemetryError as error:
            problem = json.dumps({"detail": str(error)})
            event = _event("problem", problem.encode())
            return problem, part_of_stream(event) if zipped else event

        def plain() -> bytes:
            return self._cache.get(view, ("event", run), lambda: _event("status", self._render(view, run)))

        if not zipped:
            return view.changes, plain()
        return view.changes, self._cache.get(view, ("zipped", run), lambda: part_of_stream(plain()))


class Subscription(Response):
    """A response that lasts until the client disconnects.

    It takes the newest event when the client can receive one, so nothing queues up for a slow client, and no other
    client waits for it. The server disconnects a client that reads nothing at all.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, interval: float, run: str | None = None) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._interval, self._run = events, interval, run
        self._zipped = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.ensure_future(_disconnected(receive))
        self._events.subscribers += 1
        self.headers["vary"] = "accept-encoding"
        self._zipped = accepts_gzip(scope)
        if self._zipped:
            self.headers["content-encoding"] = "gzip"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._zipped:
                await send({"type": "http.response.body", "body": STREAM_HEAD, "more_body": True})
            await self._send_until(disconnected, send)
        finally:
            self._events.subscribers -= 1
            disconnected.cancel()

    async def _send_until(self, disconnected: asyncio.Future[None], send: Send) -> None:
        sent_version: int | str | None = None
        sent_at = due = time.monotonic()
        while not disconnected.done():
            version, event = await self._events.newest(self._run, zipped=self._zipped)
            if version == sent_version:
                idle_seconds = time.monotonic() - sent_at
                comment = part_of_stream(_COMMENT) if self._zipped else _COMMENT
                event = comment if idle_seconds >= self._events.keepalive_seconds else b""
            if event:
                sent_version, sent_at = version, time.monotonic()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            due = max(due + self._interval, time.monotonic())
            await asyncio.wait([disconnected], timeout=due - time.monotonic())


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
