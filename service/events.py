"""Server-sent events: the status, pushed to whoever keeps listening."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.cached import Kept
from service.view import View
from service.watch import Watch
from tiering.telemetry import TelemetryError

MOST_SUBSCRIBERS = 64  # a handful look at a node; more are a loop that opens streams and leaves them open
# Seconds: proxies take a connection for dead that is silent for longer, so there is a comment then.
PATIENCE = 15.0


class Events:
    """What subscribers are told, and how many there are.

    ``render`` makes the data of an event for who wants one run, or all; its bytes are made once per View. Belongs to
    one event loop.
    """

    def __init__(
        self,
        watch: Watch,
        kept: Kept,
        render: Callable[[View, str | None], bytes],
        *,
        most: int = MOST_SUBSCRIBERS,
        patience: float = PATIENCE,
    ) -> None:
        self._watch, self._kept, self._render, self._most = watch, kept, render, most
        self.patience = patience
        self.subscribers = 0

    @property
    def full(self) -> bool:
        """Whether one more is too many."""
        return self.subscribers >= self._most

    async def newest(self, run: str | None) -> tuple[int | str, bytes]:
        """What tells this event from earlier ones, and its bytes."""
        try:
            view = await self._watch.now()
        except TelemetryError as error:
            problem = json.dumps({"detail": str(error)})
            return problem, _event("problem", problem.encode())
        event = self._kept.of(view, ("event", run), lambda: _event("status", self._render(view, run)))
        return view.changes, event


class Subscription(Response):
    """A response that lasts until the client leaves.

    It takes the newest event when it is ready for one, so that nothing queues up for a slow client and nobody waits for
    it; the server cuts off who takes nothing at all.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, interval: float, run: str | None = None) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._interval, self._run = events, interval, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_departure(receive))
        self._events.subscribers += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._tell_until(gone, send)
        finally:
            self._events.subscribers -= 1
            gone.cancel()

    async def _tell_until(self, gone: asyncio.Future[None], send: Send) -> None:
        told: int | str | None = None
        told_at = due = time.monotonic()
        while not gone.done():
            news, event = await self._events.newest(self._run)
            if news == told:
                silent_for = time.monotonic() - told_at
                event = b": nothing new\n\n" if silent_for >= self._events.patience else b""
            if event:
                told, told_at = news, time.monotonic()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            due = max(due + self._interval, time.monotonic())
            await asyncio.wait([gone], timeout=due - time.monotonic())


async def _departure(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
