"""Waiting for threads: until the last has ended, until a deadline, and with signals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from tiering.tierbench.load.countdown import Countdown


class StillWaitingError(Exception):
    pass


@pytest.fixture
def late_handler() -> Iterator[None]:
    """A signal in 50 ms with a handler that takes 200 ms; after 5 s one that raises."""
    signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            raise StillWaitingError
        time.sleep(0.2)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_deadline_that_passes_in_a_handler_ends_the_wait(late_handler: None) -> None:
    assert not Countdown(1).wait_until(time.monotonic() + 0.15)


def test_the_last_thread_ends_the_wait() -> None:
    running = Countdown(2)
    threads = [threading.Thread(target=running.count_down) for _ in range(2)]
    threads[0].start()
    threads[0].join()
    assert not running.wait_until(time.monotonic())
    threads[1].start()
    assert running.wait_until(time.monotonic() + 60)
    threads[1].join()
    running.count_down()
    assert running.wait_until(time.monotonic())  # again
    assert Countdown(0).wait_until(time.monotonic())
