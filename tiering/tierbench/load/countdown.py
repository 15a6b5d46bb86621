"""Waiting for the end of several threads, without CPU time and safe from signals."""

from __future__ import annotations

import threading
import time


class Countdown:
    """A count that threads lower to zero, and that another thread waits for.

    Made of locks: they are in C, so a sleeping thread costs less CPU time than in a condition or a semaphore. A
    ``queue.SimpleQueue`` would do, but its ``get`` waits forever if a signal's handler outlasts the timeout (CPython
    before 3.13).
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._counting = threading.Lock()
        self._above_zero = threading.Lock()
        if count > 0:
            self._above_zero.acquire()

    def count_down(self) -> None:
        """Lower the count by one; below zero it has no effect."""
        with self._counting:
            self._count -= 1
            if self._count == 0:
                self._above_zero.release()

    def wait_until(self, deadline: float) -> bool:
        """Wait until the count is zero and return True, or until ``time.monotonic()`` is ``deadline``."""
        is_zero = self._above_zero.acquire(timeout=max(0.0, deadline - time.monotonic()))
        if is_zero:
            self._above_zero.release()
        return is_zero
