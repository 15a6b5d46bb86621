"""Our engine, by a configuration as any user's.

``settings``: ``directory`` of the swap space, None without; ``param`` and ``optimizer``, where these are offloaded to;
``zero`` and ``tiering``, further keys of those sections; ``clip``, the largest norm of the gradients, 0 for any;
``resize``, to unshard groups as where torch cannot exchange storages' memory.
"""

from __future__ import annotations

import time
from typing import Any

from .serve import serve
from .work import ADAMW, CLIP, Work

QUIET = 0.002
"""Seconds between two looks at what is in flight."""


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it."""

    def place(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": settings["directory"]} if device == "nvme" else {})

    zero = dict(settings.get("zero", {}))
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.get("clip", CLIP),
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place(settings["param"]),
            "offload_optimizer": place(settings["optimizer"]) | zero.pop("offload_optimizer", {}),
            **zero,
        },
        "tiering": settings.get("tiering", {}),
    }


class Ours:
    """The engine, and what it counts."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        import tiering  # after the baseline was taken

        config = configuration(settings)
        if settings.get("resize"):
            from zero3 import tiers

            tiers.can_exchange = lambda device: False  # what it answers there
        self.about = f"tiering {tiering.__version__}"
        with tiering.zero.Init(config=config):
            module = work.build()
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.engine = tiering.initialize(model=module, config=config).engine

    def facts(self) -> dict[str, Any]:
        from tiering.plan import Tier

        plan = self.engine.plan
        return {
            "about": self.about,
            "parameters": self.parameters,
            "planned": {tier.value: plan.total(tier) for tier in Tier},
            "updated": plan.updated(),
            "budgets": {tier.value: plan.budgets.of(tier) for tier in Tier},
        }

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.engine(tokens, targets)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def settle(self) -> None:
        """Until no transfer of NVMe is in flight and none has ended, twice in a row."""
        seen, quiet = self._transfers(), 0
        while seen != (0, 0) and quiet < 2:
            time.sleep(QUIET)
            now = self._transfers()
            quiet = quiet + 1 if now == seen and not now[0] else 0
            seen = now

    def counters(self) -> dict[str, float]:
        now = self.engine.snapshot()
        link = now.link
        moved = {way: getattr(link, way) for way in ("h2d", "d2h")} if link is not None else {}
        return {
            "read": sum(path.read.bytes for path in now.io),
            "written": sum(path.written.bytes for path in now.io),
            "stalled": sum(now.stalls.values()),
            **{f"stalled: {cause}": seconds for cause, seconds in now.stalls.items()},
            **{f"{way}: bytes": copies.bytes for way, copies in moved.items()},
            **{f"{way}: copies": copies.copies for way, copies in moved.items()},
            **{f"{way}: busy": copies.busy_seconds for way, copies in moved.items()},
        }

    def close(self) -> None:
        self.engine.close()

    def _transfers(self) -> tuple[int, int]:
        """Operations in flight, and operations ended so far."""
        paths = self.engine.snapshot().io
        return (
            sum(path.read.in_flight + path.written.in_flight for path in paths),
            sum(path.read.ops + path.written.ops for path in paths),
        )


if __name__ == "__main__":
    serve(Ours)
