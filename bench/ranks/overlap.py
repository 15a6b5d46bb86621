"""What a trace of one step on one rank says of the network: how long it was in use, and how long compute waited."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAITS = ("gather", "reduce")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a step. ``used``: at least one gather or exchange was under way, from its issue until it was complete,
    or until who waited for it went on. ``waited``: the thread that trains waited for one."""

    step: float
    used: float
    waited: float

    @property
    def share(self) -> float:
        """The part of ``used`` in which the rank did something else than wait."""
        return 1 - self.waited / self.used if self.used else 1.0


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``spans``, (begin, end) each."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def read(path: Path) -> Overlap:
    """Of the trace in ``path``; what runs over from or into another step counts as far as it lies in this one."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    (step,) = (event for event in events if event["cat"] == "step")
    first, last = step["ts"], step["ts"] + step["dur"]

    def seconds(events: list[dict[str, Any]]) -> float:
        spans = [(max(first, event["ts"]), min(last, event["ts"] + event["dur"])) for event in events]
        return covered(span for span in spans if span[0] < span[1]) / 1e6

    waits = [event for event in events if event["cat"] == "stall" and event["name"] in WAITS]
    flights = [event for event in events if event["cat"] == "network"]
    return Overlap(step["dur"] / 1e6, seconds(flights + waits), seconds(waits))
