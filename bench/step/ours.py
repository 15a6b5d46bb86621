"""Our engine, by a configuration as any user's.

``settings``: ``directory`` of the swap space, None to keep everything in memory; ``tiering``, that section of the
configuration as it is (budgets, state, cache_in_host, ...); ``zero``, further keys of zero_optimization.
"""

from __future__ import annotations

import time
from typing import Any

from .reference import ADAMW, CLIP, Model
from .serve import serve

QUIET = 0.002
"""Seconds between two looks at what is in flight."""


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it."""
    directory = settings["directory"]
    place = {"device": "nvme", "nvme_path": directory} if directory else {"device": "none"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            **settings.get("zero", {}),
        },
        "tiering": settings["tiering"],
    }


class Ours:
    """The engine, and what it counts."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        import tiering  # after the baseline was taken

        config = configuration(settings)
        self.about = f"tiering {tiering.__version__}"
        with tiering.zero.Init(config=config):
            module = model.build()
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.engine = tiering.initialize(model=module, config=config).engine

    def facts(self) -> dict[str, Any]:
        from tiering.plan import Tier

        plan, io = self.engine.plan, self.engine.snapshot().io_engine
        read, written = plan.nvme_traffic()
        return {
            "about": self.about,
            "parameters": self.parameters,
            "planned_read": read,
            "planned_written": written,
            "owned": plan.total(Tier.DEVICE) + plan.total(Tier.HOST),
            "on_nvme": plan.total(Tier.NVME),
            "io_engine": io.name if io is not None else "",
            "io_flags": io.flags if io is not None else [],
        }

    def forward(self, tokens: Any, targets: Any) -> Any:
        return self.engine(tokens, targets)

    def backward(self, loss: Any) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()

    def settle(self) -> float:
        """Since when nothing is in flight and nothing has ended, twice in a row."""
        seen, since, quiet = self._transfers(), time.perf_counter(), 0
        while quiet < 2:
            time.sleep(QUIET)
            now, at = self._transfers(), time.perf_counter()
            if now == seen and not now[0]:
                quiet += 1
            else:
                seen, since, quiet = now, at, 0
        return since

    def counters(self) -> dict[str, float]:
        now = self.engine.snapshot()
        return {
            "read": sum(path.read.bytes for path in now.io),
            "written": sum(path.written.bytes for path in now.io),
            "retries": sum(path.read.retries + path.written.retries for path in now.io),
            "stalled": sum(now.stalls.values()),
            **{f"stalled: {cause}": seconds for cause, seconds in now.stalls.items()},
        }

    def trace(self, path: str) -> None:
        self.engine.trace(path)

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
