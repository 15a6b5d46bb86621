"""Our engine on one rank.

``settings``: ``stage``; ``precision``, bf16 or fp32; ``offload``, device by section name; ``tiering``, that section of
the configuration; ``persistent``, elements of the largest parameter that stays whole in stage 3; ``directory`` of the
swap space, where one is needed.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from frame import reference_model
from frame.engine import EngineSide
from frame.process import cpu_seconds
from frame.reference_model import Model, offload
from frame.training import serve_training

LOOK = 0.0005
"""Seconds between two looks at what is under way."""


def configuration(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it."""
    zero: dict[str, Any] = {"stage": settings["stage"]}
    for section, device in settings.get("offload", {}).items():
        zero[section] = offload(device, settings["directory"])
    if "persistent" in settings:
        zero["stage3_param_persistence_threshold"] = settings["persistent"]
    shared = reference_model.configuration(zero, batch=model.batch, bf16=settings["precision"] == "bf16")
    return shared | {"tiering": settings.get("tiering", {})}


class Flights:
    """The gathers and exchanges of ``collectives`` that are under way."""

    def __init__(self, collectives: Any) -> None:
        self._works: deque[Any] = deque()
        for name in ("gather", "exchange"):
            setattr(collectives, name, self._watched(getattr(collectives, name)))

    def settle(self) -> float:
        """Wait for all; the ``perf_counter`` at which none was under way."""
        while self._works:
            if self._works[0].is_completed():
                self._works.popleft()
            else:
                time.sleep(LOOK)
        return time.perf_counter()

    def _watched(self, begin: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            pending = begin(*args, **kwargs)
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.extend(pending.works)
            return pending

        return watched


class Ours(EngineSide):
    """The engine, and what it counts."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        super().__init__(model.build, configuration(model, settings), partitioned=settings["stage"] == 3)
        self.flights = Flights(self.engine._collectives)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "planned": sum(self.engine.plan.sent_bytes().values())}

    def settle(self) -> float:
        return self.flights.settle()

    def counters(self) -> dict[str, float]:
        now = self.engine.snapshot()
        return {
            "cpu": cpu_seconds(),
            **{f"sent: {collective.kind}": collective.sent_bytes for collective in now.collectives},
            "spared": self.engine._collectives.spared,
            **{f"stalled: {cause}": seconds for cause, seconds in now.stalls.items()},
        }


if __name__ == "__main__":
    serve_training(Ours)
