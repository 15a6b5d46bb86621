"""What takes long to make of a View, made beside everything else that is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from service.view import View
from service.watch import Watch

Answer = TypeVar("Answer")


class Aside(Generic[Answer]):
    """Made in a thread, one at a time; all who wait while one is made share the next. Belongs to one event loop."""

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
