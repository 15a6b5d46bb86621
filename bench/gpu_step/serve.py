"""What the process of a side does: builds the model once, then trains so many steps whenever it is asked to.

The first line of input says what to build; each further one is ``{"steps": n, "tokens": m}``, m in each step, and is
answered by a line of JSON. Standard library and torch only.

A round's clock runs from its first step until device and disk have nothing more to do: what a side leaves behind its
last step is paid for in the round that caused it. Beside it the device's own clock tells how long forward and backward
took, on whose stream compute stands still for bytes that are late; what is between two of them is the update, as far as
it is not hidden behind them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from frame.process import age, resident

from .meter import Meter, meter
from .shape import Shape
from .work import Work

SETTLE = 0.05
"""Seconds of sleep before each round. Idle OpenMP threads of the side that was last spin for some milliseconds."""


class Trainer(Protocol):
    """A side: the parts of one training step, and what it can tell of itself."""

    def facts(self) -> dict[str, Any]:
        """What is known once it is built: ``about``, ``parameters`` and, where it has one, its plan."""

    def forward(self, tokens: Any, targets: Any) -> Any: ...
    def backward(self, loss: Any) -> None: ...
    def update(self) -> None: ...
    def settle(self) -> None:
        """Wait for transfers that the last step left behind, beside what the device has still to do."""

    def counters(self) -> dict[str, float]:
        """Totals so far, by name; empty without counters."""

    def close(self) -> None: ...


Build = Callable[[Work, dict[str, Any]], Trainer]


def train(trainer: Trainer, meter: Meter, batches: Iterator[Any], steps: int) -> dict[str, Any]:
    """One round."""
    time.sleep(SETTLE)
    meter.begin()
    before = trainer.counters()
    update = 0.0
    loss: Any = None
    began = time.perf_counter()
    for _ in range(steps):
        tokens, targets = next(batches)
        meter.mark()
        loss = trainer.forward(tokens, targets)
        trainer.backward(loss)
        meter.mark()
        backwarded = time.perf_counter()
        trainer.update()
        update += time.perf_counter() - backwarded
    meter.settle()
    trainer.settle()
    seconds = time.perf_counter() - began
    after = trainer.counters()
    return {
        "steps": steps,
        "seconds": seconds,
        "update": update,
        "loss": float(loss.detach()),
        "counted": {name: after[name] - before.get(name, 0) for name in after},
        **meter.read(),
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

    torch.set_num_threads(asked["threads"])
    work = Work(**asked["work"] | {"shape": Shape(**asked["work"]["shape"])})
    gauge = meter(work.card)
    warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True, device=work.device)
    torch.autograd.backward((warm @ warm).float().sum())
    gauge.settle()
    baseline = resident("VmRSS")
    gauge.begin()
    trainer = build(work, asked["settings"])
    try:
        gauge.settle()
        answer(
            {**trainer.facts(), **gauge.facts(), "baseline": baseline, "built": gauge.read(), "age": age()}
        )
        batches: dict[int, Iterator[Any]] = {}
        for line in lines:
            question = json.loads(line)
            tokens = question["tokens"]
            batches.setdefault(tokens, work.batches(tokens))
            answer(train(trainer, gauge, batches[tokens], question["steps"]))
    finally:
        trainer.close()
