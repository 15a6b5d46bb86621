"""The engine over stand-ins for drives: files in memory whose transfers take time, but move no byte.

``settings``: ``directory`` of the files; ``paths``, their number; ``rate``, bytes per second of each, reads and writes
together; ``layers`` and ``width`` of the model; ``staging_seconds`` of the configuration; ``late``, the seconds by
which every ``late_every``th block of the last path is late. Optimizer state is on the paths, and everything else in
memory. The update itself is left out, because on few cores it would hide what its surroundings cost: the kernels get no
segment.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from frame.child import serve

LIBRARIES = ("tiering._aio", "optim_cpu._kernels")
"""Extension modules in C, which release the GIL in every call."""
LATE_BLOCKS = 2000
"""More than a run has."""

LONG_CALL = 50e-6
"""Seconds of a call after which another thread has taken the GIL, if it wants to."""


PYTHON, NATIVE = "python", "native"
"""What the thread beside a step runs: Python without a pause, or C that needs no GIL."""
NATIVE_ROUNDS = 5_000
"""About two milliseconds of C, between which the thread has the GIL for microseconds."""


class StandIns:
    """A model of linear layers in bf16, whose state passes through the staging slots in every step."""

    def __init__(self, threads: int, model: None, settings: dict[str, Any]) -> None:
        import torch

        import tiering
        from optim_cpu.kernels import PreparedStep, StepBatch
        from tiering.storage import slabs
        from tiering.storage.aio import AioContext, Fault, FaultPlan
        from zero3.device import tiers
        from zero3.optimizer.tile_stepper import TileStepper

        self._tiles, self._cpu, self._wall = 0, 0.0, 0.0
        self._busy = threading.Event()
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        paths = [Path(settings["directory"]) / f"drive{number}" for number in range(settings["paths"])]
        for path in paths:
            path.mkdir()
        late, every = settings.get("late", 0.0), settings.get("late_every", 1)
        faults = tuple(
            Fault(first=block, file=len(paths) - 1, delay=late, moves_none=True)
            for block in range(every, LATE_BLOCKS * every + 1 if late else 0, every)
        )
        faults += tuple(
            Fault(count=0, file=number, rate=settings["rate"], moves_none=True)
            for number in range(len(paths))
        )
        part = StepBatch.part

        def count(batch: StepBatch, grad_scale: float) -> None:
            self._tiles += 1

        def counted(batch: StepBatch, first: int, number: int, grad_scale: float) -> PreparedStep:
            self._tiles += 1
            return part(batch, first, 0, grad_scale)

        replace(tiers, "AioContext", partial(AioContext, fault=FaultPlan(faults)))
        # The stand-ins are equally fast, and nothing has to be measured.
        replace(slabs, "measure", lambda _, files: [1] * len(files))
        # Each tile is stepped by one of the two: without its segments.
        replace(StepBatch, "run", count)
        replace(StepBatch, "part", counted)
        finish = TileStepper.finish

        def timed(stepper: TileStepper) -> None:
            cpu, wall = time.thread_time(), time.perf_counter()
            finish(stepper)
            self._cpu, self._wall = time.thread_time() - cpu, time.perf_counter() - wall

        replace(TileStepper, "finish", timed)
        width = settings["width"]
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(settings["layers"])]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": [str(path) for path in paths]},
            },
            "tiering": {
                "cache_in_host": False,
                "host_budget": settings["host_budget"],
                "telemetry": {"enabled": False},
                "staging": {"seconds": settings.get("staging_seconds", 0.0)},
                "io": {"allow_memory_file_system": True},
            },
        }
        self._engine = tiering.initialize(model=torch.nn.Sequential(*layers), config=config).engine
        self._input = torch.ones(1, width, dtype=torch.bfloat16)

    def facts(self) -> dict[str, Any]:
        plan = self._engine.plan
        read, written = plan.nvme_traffic()
        return {"bytes": read + written, "slots": plan.staging.slots, "slot_bytes": plan.staging.slot_bytes}

    def step(self, beside: str | None = None, count: bool = False) -> dict[str, Any]:
        """One step: its tiles, CPU and wall seconds of the loop that steps them, wall seconds of the whole iteration.

        ``beside``: beside a thread that is busy with PYTHON or NATIVE code. ``count``: the calls of C by name instead,
        and those that took at least LONG_CALL, which takes time of its own.
        """
        iteration_began = time.perf_counter()
        self._engine.backward(self._engine(self._input).float().pow(2).mean())
        calls: Counter[str] = Counter()
        long_calls: Counter[str] = Counter()
        began = 0.0

        def note(frame: object, event: str, function: Any) -> None:
            nonlocal began
            if getattr(function, "__module__", None) not in LIBRARIES:
                return
            if event == "c_call":
                calls[function.__name__] += 1
                began = time.perf_counter()
            elif event == "c_return" and time.perf_counter() - began >= LONG_CALL:
                long_calls[function.__name__] += 1

        self._tiles, thread = 0, None
        if beside:
            self._busy.set()
            thread = threading.Thread(target=self._spin if beside == PYTHON else self._hash, daemon=True)
            thread.start()
        if count:
            sys.setprofile(note)
        try:
            self._engine.step()
            iteration = time.perf_counter() - iteration_began
        finally:
            sys.setprofile(None)
            self._busy.clear()
            if thread is not None:
                thread.join()
        return {
            "tiles": self._tiles,
            "cpu": self._cpu,
            "wall": self._wall,
            "iteration": iteration,
            "calls": dict(calls),
            "long_calls": dict(long_calls),
        }

    def close(self) -> None:
        self._engine.close()

    def _spin(self) -> None:
        turns = 0
        while self._busy.is_set():
            turns += 1

    def _hash(self) -> None:
        while self._busy.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", NATIVE_ROUNDS)


def replace(owner: object, name: str, value: object) -> None:
    """Set an attribute whose type does not allow it."""
    setattr(owner, name, value)


if __name__ == "__main__":
    serve(StandIns)
