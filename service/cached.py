"""Answers, each made once of one View, however many ask for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from service.view import View

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
