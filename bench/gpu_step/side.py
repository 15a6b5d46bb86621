"""A side as the benchmark sees it: a process that trains when told to, and sleeps otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from frame import side
from frame.side import Place

from .work import Work

GOODBYE = 10.0
"""Seconds that a side gets to close: the driver unpins gigabytes."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of a side, and what they came to: of all of them together, until nothing was in flight any more.

    ``update`` is how long the calls that step took. ``computed`` is what forward and backward took by the device's own
    clock; it, and what torch's allocator counted, is None on a CPU. ``counted`` is what the side counts itself.
    """

    tokens: int  # in a step
    steps: int
    seconds: float
    update: float
    loss: float
    counted: dict[str, float]
    host: int
    pinned: int | None
    allocated: int | None
    reserved: int | None
    unusable: int | None
    device_allocations: int | None
    retries: int | None
    computed: float | None

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.per_step

    def share(self, name: str) -> float:
        """Of the round's seconds, those of a counter."""
        return self.counted.get(name, 0.0) / self.seconds


@dataclass(frozen=True, slots=True)
class Spec(side.Spec):
    """It will take about so many bytes of the device and of host memory."""

    device: int = 0
    host: int = 0


class Side(side.Side):
    """A process that builds its model, from now on: ``built`` waits for that. Raises SideError."""

    def __init__(self, spec: Spec, work: Work, place: Place) -> None:
        self._work = work
        super().__init__(spec, replace(place, patience=GOODBYE, device=work.device), wait=False)

    def arguments(self) -> dict[str, Any]:
        settings = self.settings(self.spec.settings)
        return {"threads": self.place.threads, "work": asdict(self._work), "settings": settings}

    def run(self, tokens: int, steps: int, seconds: float) -> Round:
        """Train ``steps`` steps of ``tokens`` tokens; SideError if that takes longer than ``seconds``."""
        (figures,) = self.call("train", patience=seconds, tokens=tokens, steps=steps)
        return Round(tokens=tokens, **figures)
