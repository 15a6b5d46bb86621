"""What the process of a side does: builds the model once, then trains so many steps whenever it is asked to.

Standard library and torch only.

A round's clock runs from its first step until device and disk have nothing more to do: what a side leaves behind its
last step is paid for in the round that caused it. Beside it the device's own clock tells how long forward and backward
took, on whose stream compute stands still for bytes that are late; what is between two of them is the update, as far as
it is not hidden behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from frame import child
from frame.process import age, resident
from frame.training import SETTLE, Trainer

from .meter import Meter, meter
from .shape import Shape
from .work import Work

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


class Training:
    """The worker of a side."""

    def __init__(self, make: Build, threads: int, work: dict[str, Any], settings: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(threads)
        self._work = Work(**work | {"shape": Shape(**work["shape"])})
        self._meter = meter(self._work.card)
        warm = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True, device=self._work.device)
        torch.autograd.backward((warm @ warm).float().sum())
        self._meter.settle()
        self._baseline = resident("VmRSS")
        self._meter.begin()
        self._trainer = make(self._work, settings)
        self._batches: dict[int, Iterator[Any]] = {}

    def facts(self) -> dict[str, Any]:
        self._meter.settle()
        return {
            **self._trainer.facts(),
            **self._meter.facts(),
            "baseline": self._baseline,
            "built": self._meter.read(),
            "age": age(),
        }

    def train(self, tokens: int, steps: int) -> dict[str, Any]:
        """A round of ``steps`` steps of ``tokens`` tokens each."""
        if tokens not in self._batches:
            self._batches[tokens] = self._work.batches(tokens)
        return train(self._trainer, self._meter, self._batches[tokens], steps)

    def close(self) -> None:
        self._trainer.close()


def serve(make: Build) -> None:
    """The main program of a module whose trainer ``make`` builds."""
    child.serve(lambda **arguments: Training(make, **arguments))
