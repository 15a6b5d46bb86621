"""Our engine, by the configuration of bench_step.py, which has trained a step: its moments are not zeros."""

from __future__ import annotations

import time
from typing import Any

from frame.reference_model import Model
from step import ours

from .saver import Saver, serve_saver

TAG = "saved"
CONSTANT = 96 << 20
"""What a process may take beside budgets and activations (docs/guide/memory.md)."""


class Ours(ours.Ours, Saver):
    """The engine, which saves and loads by its own methods."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        super().__init__(model, settings)
        self._batches = model.batches()
        self.change()

    def room(self) -> int:
        """What the plan took of the budgets, activations, and the constant."""
        from tiering.placement.workload import Tier

        plan, activations = self.engine.plan, self.engine.snapshot().activations.peak
        return plan.total(Tier.DEVICE) + plan.total(Tier.HOST) + activations + CONSTANT

    def change(self) -> None:
        self.step(self._batches)

    def step(self, batches: Any) -> None:
        self.backward(self.forward(*next(batches)))
        self.update()

    def save(self, directory: str) -> None:
        self.engine.save_checkpoint(directory, TAG)

    def load(self, directory: str) -> None:
        self.engine.load_checkpoint(directory, TAG)

    def train(self, batches: Any, steps: int, directory: str, mode: str) -> dict[str, float]:
        """``steps`` steps, with a save before them that is in the foreground, in the background, or left out ("").

        Until all is written and nothing is in flight any more. What the save says of itself; ``called``: seconds until
        the first step could begin; ``meanwhile``: seconds of the ``steps`` that began before the save was over.
        """
        began = time.perf_counter()
        saving = (
            self.engine.save_checkpoint(directory, TAG, background=mode == "background") if mode else None
        )
        called = time.perf_counter() - began
        meanwhile: list[float] = []
        for _ in range(steps):
            under_way = saving is not None and not saving.done
            at = time.perf_counter()
            self.step(batches)
            if under_way:
                meanwhile.append(time.perf_counter() - at)
        if saving is None:
            self.settle()
            return {}
        saving.wait()
        self.settle()
        return {
            "called": called,
            "saved": saving.seconds,
            "stalled": saving.stalled,
            "steps": len(meanwhile),
            "meanwhile": sum(meanwhile),
        }

    def fingerprint(self) -> list[float]:
        """The count of steps, and a parameter of each kind of state."""
        engine = self.engine
        name = max(name for name, _ in engine.module.named_parameters())
        tensors = [engine.get_fp32_state(name, key) for key in engine.state_names]
        tensors.append(engine.get_fp32_parameter(name))
        return [float(engine.global_steps), *(float(tensor.double().sum()) for tensor in tensors)]


if __name__ == "__main__":
    serve_saver(Ours)
