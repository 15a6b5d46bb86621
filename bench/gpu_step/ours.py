"""Our engine, by a configuration as any user's.

``settings``: ``directory`` of the swap space, None without; ``param`` and ``optimizer``, where these are offloaded to;
``zero`` and ``tiering``, further keys of those sections; ``clip``, the largest norm of the gradients, 0 for any;
``resize``, to unshard groups as where torch cannot exchange storages' memory.
"""

from __future__ import annotations

from typing import Any

from frame import reference_model
from frame.engine import EngineSide
from frame.reference_model import CLIP, offload

from .serve import serve
from .work import Work


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it."""
    zero, directory = dict(settings.get("zero", {})), settings.get("directory")
    zero = {
        "stage": 3,
        "offload_param": offload(settings["param"], directory),
        "offload_optimizer": offload(settings["optimizer"], directory) | zero.pop("offload_optimizer", {}),
        **zero,
    }
    shared = reference_model.configuration(zero, clip=settings.get("clip", CLIP))
    return shared | {"tiering": settings.get("tiering", {})}


class Ours(EngineSide):
    """The engine, its plan, and what its copies count."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        if settings.get("resize"):
            from zero3.device import tiers

            tiers.can_exchange = lambda device: False  # what it answers there
        super().__init__(work.build, configuration(settings))

    def facts(self) -> dict[str, Any]:
        from tiering.placement.workload import Tier

        plan = self.engine.plan
        return {
            **super().facts(),
            "planned": {tier.value: plan.total(tier) for tier in Tier},
            "updated": plan.updated(),
            "budgets": {tier.value: plan.budgets.of(tier) for tier in Tier},
        }

    def counters(self) -> dict[str, float]:
        link = self.engine.snapshot().link
        moved = {way: getattr(link, way) for way in ("h2d", "d2h")} if link is not None else {}
        return {
            **super().counters(),
            **{f"{way}: bytes": copies.bytes for way, copies in moved.items()},
            **{f"{way}: copies": copies.copies for way, copies in moved.items()},
            **{f"{way}: busy": copies.busy_seconds for way, copies in moved.items()},
        }


if __name__ == "__main__":
    serve(Ours)
