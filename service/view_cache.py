"""A cache of responses: each is rendered once per View, however many clients ask for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from service.view import View

MAX_ENTRIES = 256  # every filter that is likely within the quarter of a second for which a View is current
Value = TypeVar("Value")


class ViewCache:
    """Values computed from the newest View; a newer View empties the cache. Belongs to one event loop."""

    def __init__(self) -> None:
        self._view: View | None = None
        self._values: dict[Hashable, object] = {}

    def get(self, view: View, key: Hashable, make: Callable[[], Value]) -> Value:
        """The cached value of ``key``, or ``make()``. A full cache calls ``make()`` each time."""
        if view is not self._view:
            self._view, self._values = view, {}
        if key not in self._values:
            if len(self._values) >= MAX_ENTRIES:
                return make()
            self._values[key] = make()
        # The values have different types: each key stands for one.
        return self._values[key]  # type: ignore[return-value]
