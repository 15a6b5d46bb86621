"""A device that takes as long as it is told for what is queued there, and the CPU's clock: what a test lets pass."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from zero3.device import timeline
from zero3.observe import trace


class QueuedDevice:
    """Also its stream that computes. Nanoseconds of the CPU, whose clock began a day before the device's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.busy_until = 0
        clock = SimpleNamespace(time=time.time, perf_counter=time.perf_counter, monotonic_ns=lambda: self.now)
        for module in (timeline, trace):
            monkeypatch.setattr(module, "time", clock)

    @property
    def compute(self) -> QueuedDevice:
        return self

    @property
    def fetch(self) -> SimpleNamespace:
        """A stream on which nothing is queued."""
        return SimpleNamespace(synchronize=lambda: None, record=lambda timed: Mark(self, self.now, timed))

    def works(self, seconds: float) -> None:
        """It is told to compute for so long."""
        self.busy_until = max(self.busy_until, self.now) + round(1e9 * seconds)

    def record(self, *, timed: bool = False) -> Mark:
        self.works(0)
        return Mark(self, self.busy_until, timed)

    def wait_for(self, event: Mark) -> None:
        self.busy_until = max(self.busy_until, event.at)

    def passes(self, seconds: float) -> None:
        """Of the CPU's time."""
        self.now += round(1e9 * seconds)


class Mark:
    """An event of it."""

    def __init__(self, device: QueuedDevice, at: int, timed: bool = True) -> None:
        self.device, self.at, self.timed = device, at, timed

    def done(self) -> bool:
        return self.at <= self.device.now

    def wait(self) -> int:
        self.device.now = max(self.device.now, self.at)
        return 0

    def seconds_since(self, earlier: Mark) -> float:
        assert self.timed and earlier.timed and self.done()
        return max(0.0, (self.at - 86400 * 10**9) / 1e9 - (earlier.at / 1e9 - 86400))
