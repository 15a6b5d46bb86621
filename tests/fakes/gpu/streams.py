"""Streams whose work is done when it is queued, and whose order is written down."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from zero3.device.streams import Event, Stream, Streams

from .operations import place
from .order import Agent, Clock

if TYPE_CHECKING:
    from tests.fakes.fake_device import FakeDevice

Answers = Callable[[], bool]
"""Whether what is under way says that it is over when asked, though nobody has waited for it."""


def at_once() -> bool:
    return True


def never() -> bool:
    return False


def by_chance(seed: int) -> Answers:
    generator = random.Random(seed)
    return lambda: generator.random() < 0.5


class FakeEvent(Event):
    def __init__(self, device: FakeDevice, clock: Clock, *, timed: bool) -> None:
        self.clock = clock
        self._device = device
        self._timed = timed
        self._at = time.perf_counter()  # work is done when it is queued

    def done(self) -> bool:
        host = self._device.host
        if not self.known and self._device.answers():
            host.learn(self.clock)
        return self.known

    def wait(self, timeout: float | None = None) -> int:
        if not self.known:
            self._device.waits.append(("event", place()))
            self._device.host.learn(self.clock)
        return 0

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, FakeEvent)
        if not (self._timed and earlier._timed and self.known and earlier.known):
            self._device.mistake("the time between two events that are not timed, or may not have come")
        return max(0.0, self._at - earlier._at)

    @property
    def known(self) -> bool:
        """Whether the CPU, in this thread, knows that it has come."""
        host = self._device.host.clock
        return all(host.get(number, -1) >= moment for number, moment in self.clock.items())


class FakeStream(Stream):
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.agent = Agent(f"stream {name}")
        self.device = device

    def record(self, *, timed: bool = False) -> Event:
        self.agent.learn(self.device.host.clock)
        return FakeEvent(self.device, dict(self.agent.clock), timed=timed)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.agent.learn(event.clock)

    @contextmanager
    def running(self) -> Iterator[None]:
        within = self.device.streams.within
        within.append(self)
        try:
            yield
        finally:
            assert within.pop() is self

    def keep(self, tensor: Tensor) -> None:
        self.device.keep(tensor, self.agent)

    def synchronize(self) -> None:
        self.device.host.learn(self.agent.clock)


class _Within(threading.local):
    """The streams on which a thread queues now, the innermost last."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []


class FakeStreams(Streams):
    def __init__(self, device: FakeDevice) -> None:
        self.default, self.fetch, self.offload, self.update, self.save, self.gather, self.reduce = (
            FakeStream(device, name)
            for name in ("compute", "fetch", "offload", "update", "save", "gather", "reduce")
        )
        self._within = _Within()

    @property
    def within(self) -> list[FakeStream]:
        return self._within.streams

    @property
    def compute(self) -> FakeStream:
        return self.within[-1] if self.within else self.default
