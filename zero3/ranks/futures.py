"""Calls that may never return, on threads that are left behind then: nothing that Python can do ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begun(call: Callable[[], T], name: str) -> Future[T]:
    """Run ``call`` on a daemon thread of that ``name``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
