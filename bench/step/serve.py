"""What the process of a side does: builds the model once, then trains so many steps whenever it is asked to.

The first line of input says what to build; each further one is ``{"steps": n}`` and is answered by a line of JSON.
Standard library and torch only.

A round's clock runs from its first step until the side is idle again: what a side writes back behind its last step is
paid for in the round that caused it. Peak memory is VmHWM: of building, and then of each round. The baseline is an
interpreter with torch, once torch's lazy parts are loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .reference import Model

SETTLE = 0.05
"""Seconds of sleep before each round. Idle OpenMP threads of the side that was last spin for some milliseconds."""


class Trainer(Protocol):
    """A side: the parts of one training step, and what it can tell of itself."""

    def facts(self) -> dict[str, Any]:
        """What is known once it is built: ``about`` and, where it has one, its plan."""

    def forward(self, tokens: Any, targets: Any) -> Any: ...
    def backward(self, loss: Any) -> None: ...
    def update(self) -> None: ...
    def settle(self) -> float:
        """Wait for transfers that the last step left behind; the ``perf_counter`` at which they were over."""

    def counters(self) -> dict[str, float]:
        """Totals so far: bytes ``read`` and ``written``, seconds ``stalled``, also by cause; empty without counters."""

    def trace(self, path: str) -> None:
        """Write a trace of the next whole step to ``path``."""

    def close(self) -> None: ...


Build = Callable[[Model, dict[str, Any]], Trainer]


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Let VmHWM begin anew, where the kernel allows it; else it goes on as an upper bound."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def disk_traffic() -> tuple[int, int]:
    """Bytes (read, written) that this process made the disks move, as the kernel counts them."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(said["read_bytes"]), int(said["write_bytes"])


def age() -> float:
    """Seconds since this process was started, by the kernel's clock."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def train(trainer: Trainer, batches: Any, steps: int) -> dict[str, Any]:
    """One round."""
    time.sleep(SETTLE)
    forget_peak()
    before, moved = trainer.counters(), disk_traffic()
    forward = backward = update = 0.0
    loss: Any = None
    began = last = time.perf_counter()
    for _ in range(steps):
        loss = trainer.forward(*next(batches))
        forwarded = time.perf_counter()
        trainer.backward(loss)
        backwarded = time.perf_counter()
        trainer.update()
        forward, backward = forward + forwarded - last, backward + backwarded - forwarded
        last = time.perf_counter()
        update += last - backwarded
    ended = max(last, trainer.settle())
    now, after = disk_traffic(), trainer.counters()
    return {
        "steps": steps,
        "seconds": ended - began,
        "forward": forward,
        "backward": backward,
        "update": update,
        "settled": ended - last,
        "loss": float(loss.detach()),
        "peak": resident("VmHWM"),
        "disk": [now[0] - moved[0], now[1] - moved[1]],
        "counted": {name: after[name] - before.get(name, 0) for name in after},
        "age": age(),
    }


def serve(build: Build) -> None:
    """Answer rounds until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    lines = iter(sys.stdin)
    asked = json.loads(next(lines))

    import torch

    imported = age()
    torch.set_num_threads(asked["threads"])
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((warm @ warm).float().sum())
    baseline = resident("VmRSS")
    model = Model(**asked["model"])
    trainer = build(model, asked["settings"])
    try:
        answer({**trainer.facts(), "baseline": baseline, "torch": imported, "peak": resident("VmHWM")})
        batches = model.tokens()
        for line in lines:
            question = json.loads(line)
            if "trace" in question:
                trainer.trace(question["trace"])
            answer(train(trainer, batches, question["steps"]))
    finally:
        trainer.close()
