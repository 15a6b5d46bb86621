"""Our engine with snapshots: what one takes beside a checkpoint, and how soon a run that resumes from it trains.

A worker builds its engine when it is called to, so that a start is measured from its beginning. A run without
``snapshots`` copies what a snapshot has; one with them adopts the swap files.
"""

from __future__ import annotations

import time
from typing import Any

from frame.child import serve
from frame.process import disk_traffic
from frame.reference_model import Model
from frame.training import baseline

from .ours import Ours


class Untrained(Ours):
    """Begins without a step."""

    def change(self) -> None:
        pass


class Resumed:
    """An engine, or none yet."""

    def __init__(self, threads: int, model: dict[str, Any], settings: dict[str, Any]) -> None:
        baseline(threads)
        self._model = Model(**model)
        self._settings = settings
        self._side: Untrained | None = None

    def facts(self) -> dict[str, Any]:
        return {}

    @property
    def side(self) -> Untrained:
        assert self._side is not None, "built by ``build`` or ``resume``"
        return self._side

    def build(self, snapshots: bool, resume: str | None = None) -> dict[str, Any]:
        """Build an engine; what its plan has."""
        tiering = {**self._settings["tiering"], "snapshots": snapshots}
        self._side = Untrained(self._model, {**self._settings, "tiering": tiering, "resume": resume})
        self._batches = self._model.batches()
        plan = self.side.engine.plan
        return {**self.side.facts(), "snapshot_bytes": plan.snapshot_bytes}

    def step(self) -> dict[str, Any]:
        return self._clocked(lambda: self.side.step(self._batches))

    def snapshot(self, directory: str) -> dict[str, Any]:
        return self._clocked(lambda: self.side.engine.snapshot_state(directory))

    def save(self, directory: str) -> dict[str, Any]:
        return self._clocked(lambda: self.side.save(directory))

    def fingerprint(self) -> list[float]:
        return self.side.fingerprint()

    def resume(self, snapshots: bool, directory: str) -> dict[str, Any]:
        """Seconds of the start of an engine, of its load, and of its first step; and the bytes of the load."""
        began = time.perf_counter()
        self.build(snapshots, directory)
        started = time.perf_counter() - began
        loaded = self._clocked(lambda: self.side.engine.load_checkpoint(directory, "snapshot"))
        fingerprint = self.side.fingerprint()
        return {"started": started, "loaded": loaded, "step": self.step(), "fingerprint": fingerprint}

    def end(self) -> None:
        self.close()

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None

    def _clocked(self, act: Any) -> dict[str, Any]:
        """Seconds until nothing is in flight, and the bytes that the disk read and wrote."""
        self.side.settle()
        before, began = disk_traffic(), time.perf_counter()
        act()
        seconds = time.perf_counter() - began
        self.side.settle()
        after = disk_traffic()
        return {"seconds": seconds, "read": after[0] - before[0], "written": after[1] - before[1]}


if __name__ == "__main__":
    serve(Resumed)
