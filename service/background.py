"""Renders slow responses in a thread, so that the event loop keeps answering other requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from service.view import View
from service.watch import Watch

Result = TypeVar("Result")


class _Rendered(NamedTuple, Generic[Result]):
    # The number of the View and not the View itself: a View of many nodes takes 30 MB.
    reading: int
    started_at: float
    result: Result


class BackgroundRenderer(Generic[Result]):
    """Calls ``render`` in a thread, one call at a time. Requests that wait during one call share the next result.

    Belongs to one event loop.
    """

    def __init__(self, watch: Watch, render: Callable[[View], Result]) -> None:
        self._watch, self._render = watch, render
        self._lock = asyncio.Lock()
        self._last: _Rendered[Result] | None = None

    async def newest(self) -> Result:
        """The result for a View that is no older than this call, or than the Watch's ``max_age``."""
        requested_at = time.monotonic()
        async with self._lock:
            if self._last is None or self._last.started_at < requested_at:
                view = await self._watch.now()
                if self._last is None or self._last.reading != view.readings:
                    started_at = time.monotonic()
                    result = await asyncio.to_thread(self._render, view)
                    self._last = _Rendered(view.readings, started_at, result)
            return self._last.result
