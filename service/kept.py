"""Answers, each made once of one View, however many ask for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from service.view import View
from service.watch import Watch

MOST = 256  # those to every filter that is likely within the quarter of a second that a View lasts
Answer = TypeVar("Answer")


class Kept:
    """What was made of the newest View, until there is a newer one. Belongs to one event loop."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._made: dict[Hashable, object] = {}

    def of(self, view: View, key: Hashable, make: Callable[[], Answer]) -> Answer:
        """``make()``, made for the first who asks by ``key`` and kept for others."""
        if view is not self._view:
            self._view, self._made = view, {}
        if key not in self._made:
            if len(self._made) >= MOST:
                return make()
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]  # a key stands for one type


class Aside(Generic[Answer]):
    """What takes so long to make of a View that it is made in a thread, so that others are answered meanwhile.

    One is made at a time; all who wait while it is share the next.
    """

    def __init__(self, watch: Watch, make: Callable[[View], Answer]) -> None:
        self._watch, self._make = watch, make
        self._turn = asyncio.Lock()
        self._last: tuple[View, float, Answer] | None = None  # of what, begun when, and what came of it

    async def newest(self) -> Answer:
        """Of a View that is no older than the question, or than the Watch would let it be."""
        asked = time.monotonic()
        async with self._turn:
            if self._last is None or self._last[1] < asked:
                view = await self._watch.now()
                if self._last is None or self._last[0] is not view:
                    begun = time.monotonic()
                    self._last = view, begun, await asyncio.to_thread(self._make, view)
            return self._last[2]
