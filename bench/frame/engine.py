"""Our engine as a side: what its sides in all benchmarks share. A subclass adds its configuration's figures."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from .training import EngineTrainer

QUIET = 0.002
"""Seconds between two looks at the transfers in flight."""
LOOKS = 2
"""Looks in a row without a transfer, after which a side is idle."""
MANY_LOOKS = 125
"""The same where bytes are judged: on a busy machine, the last transfers of a step may begin late."""


class EngineSide(EngineTrainer):
    """The engine by ``config``, with the module that ``build`` makes; under ``zero.Init`` if ``partitioned``."""

    looks = LOOKS

    def __init__(
        self, build: Any, config: dict[str, Any], *, partitioned: bool = True, resume: str | None = None
    ) -> None:
        import tiering  # after the baseline was taken

        self.about = f"tiering {tiering.__version__}"
        with tiering.zero.Init(config=config) if partitioned else nullcontext():
            module = build()
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        self.engine = tiering.initialize(model=module, config=config, resume=resume).engine

    def facts(self) -> dict[str, Any]:
        return {"about": self.about, "parameters": self.parameters}

    def settle(self) -> float:
        """Wait until no transfer of NVMe is in flight and none has ended, ``looks`` times in a row."""
        previous, since, quiet = self._transfers(), time.perf_counter(), 0
        while previous != (0, 0) and quiet < self.looks:
            time.sleep(QUIET)
            now, at = self._transfers(), time.perf_counter()
            if now == previous and not now[0]:
                quiet += 1
            else:
                previous, since, quiet = now, at, 0
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

    def masters(self) -> dict[str, Any]:
        masters: dict[str, Any] = self.engine.master_state_dict()
        return masters

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
