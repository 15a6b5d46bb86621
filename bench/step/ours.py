"""Our engine, by a configuration as any user's.

``settings``: ``directory`` of the swap space, None to keep everything in memory; ``tiering``, that section of the
configuration as it is (budgets, state, cache_in_host, ...); ``zero``, further keys of zero_optimization; ``clip``;
``accumulation``, micro-batches of a step; ``exact``, whether rounds wait longer for their last bytes; ``resume``, as
``tiering.initialize`` takes it.
"""

from __future__ import annotations

from typing import Any

from frame import reference_model
from frame.engine import LOOKS, MANY_LOOKS, EngineSide
from frame.reference_model import Model, offload
from frame.training import serve_training


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it."""
    directory = settings["directory"]
    place = offload("nvme" if directory else "none", directory)
    zero = {"stage": 3, "offload_param": place, "offload_optimizer": place, **settings.get("zero", {})}
    clip = settings.get("clip", reference_model.CLIP)
    return reference_model.configuration(zero, clip=clip) | {
        "gradient_accumulation_steps": settings.get("accumulation", 1),
        "tiering": settings["tiering"],
    }


class Ours(EngineSide):
    """The engine with the reference model, and its plan."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        super().__init__(model.build, configuration(settings), resume=settings.get("resume"))
        self.looks = MANY_LOOKS if settings.get("exact") else LOOKS

    def facts(self) -> dict[str, Any]:
        from tiering.placement.workload import Tier

        plan, io = self.engine.plan, self.engine.snapshot().io_engine
        read, written = plan.nvme_traffic()
        return {
            **super().facts(),
            "planned_read": read,
            "planned_written": written,
            "owned": plan.total(Tier.DEVICE) + plan.total(Tier.HOST),
            "on_nvme": plan.total(Tier.NVME),
            "io_engine": io.name if io is not None else "",
            "io_flags": io.flags if io is not None else [],
        }


if __name__ == "__main__":
    serve_training(Ours)
