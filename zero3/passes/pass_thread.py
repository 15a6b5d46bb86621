"""The one thread that may run a pass. Groups are unsharded and resharded for one pass at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

RELEASE_TIMEOUT = 1.0  # seconds in which autograd's threads drop a backward that an exception has ended


class PassThread:
    """The thread that runs the forwards of a pass, and whether autograd still runs its backward."""

    def __init__(self) -> None:
        self._forward_thread = 0
        self._backward: Callable[[], object | None] = _no_backward

    def claim(self) -> None:
        """The calling thread runs the pass."""
        self._forward_thread = threading.get_ident()

    def begin_backward(self, backward: Callable[[], object | None]) -> None:
        """``backward`` returns an object as long as autograd runs the backward that begins now, then None."""
        self._backward = backward

    def is_other(self) -> bool:
        """Whether the pass belongs to another thread that still exists."""
        if self._forward_thread == threading.get_ident():
            return False
        return any(thread.ident == self._forward_thread for thread in threading.enumerate())

    def backward_runs(self) -> bool:
        """Whether autograd still runs the backward that has begun. Waits up to ``RELEASE_TIMEOUT`` for its end.

        A backward that an exception ended is over as soon as autograd's own thread drops it, a moment after the
        exception has reached the caller: without the wait, a loop that retries would be refused.
        """
        deadline = time.monotonic() + RELEASE_TIMEOUT
        while runs := self._backward() is not None:
            if time.monotonic() > deadline:
                break
            # The GIL is free meanwhile, so that the thread of autograd can drop the pass.
            time.sleep(0.001)
        return runs


def _no_backward() -> None:
    return None
