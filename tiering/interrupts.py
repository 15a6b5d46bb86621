"""Ctrl-C waits where it must not cut in: half an update is no state that anybody could use, and a transfer that was
begun but not noted would go on in memory that its owner has given back."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold the first SIGINT back until the block ends; a second one goes through at once.

    Only where Python handles signals (the main thread) and a Python handler is set; elsewhere this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            held.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` under ``deferred_interrupts``."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> R:
        with deferred_interrupts():
            return function(*args, **kwargs)

    return whole
