"""DeepSpeedCPUAdam as the benchmark sees it: a process that does a job when told to, and sleeps otherwise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frame.side import PEER_RECIPE, Place, Side, SideError, Spec

if TYPE_CHECKING:
    from .steps import Model

PATIENCE = 600.0
"""Seconds that an answer may take: its extension is compiled at its first use."""


class Peer(Side):
    """A worker with ``threads`` threads, run by the interpreter ``python``, that steps the arrays of ``model``.

    ``idle_cpu`` are the CPU seconds that it used between its jobs, and ``our_cpu`` those that this process used during
    them: either side is to leave the machine to the other. Raises SideError when it does not start.
    """

    def __init__(self, python: Path, model: Model, threads: int) -> None:
        self.idle_cpu = self.our_cpu = self.busy = 0.0
        self._last: float | None = None
        self._arrays = model.for_peer()
        spec = Spec(
            f"DeepSpeedCPUAdam of --peers {python}",
            "adam.worker",
            python=python,
            descriptors=(model.pages.descriptor,),
        )
        try:
            super().__init__(spec, Place(Path(), threads, PATIENCE))
        except SideError as error:
            raise SideError(f"{error}; {PEER_RECIPE}") from error
        self.about: str = self.facts["about"]

    def arguments(self) -> dict[str, Any]:
        return {"threads": self.place.threads, **self._arrays}

    def run(self, job: str) -> float:
        """Do ``job``, "step" or "whole", and return its milliseconds, as the worker measured them."""
        before = time.process_time()
        (timed,) = self.call("run", job=job)
        self.our_cpu += time.process_time() - before
        self.busy += timed["ms"] / 1e3
        if self._last is not None:
            self.idle_cpu += timed["asked"] - self._last
        self._last = timed["done"]
        return float(timed["ms"])

    def check(self) -> dict[str, Any]:
        """``odd`` values found in its state, and its ``step``."""
        checked: dict[str, Any] = self.call("check")[0]
        return checked
