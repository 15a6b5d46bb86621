"""Calls that may never return. They run on threads of their own, which are abandoned if a call is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Run ``call`` on a daemon thread named ``name``: it keeps no process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
