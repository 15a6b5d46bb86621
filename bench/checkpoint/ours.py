"""Our engine, by the configuration of bench_step.py, which has trained a step: its moments are not zeros."""

from __future__ import annotations

from typing import Any

from ranks.serve import Work
from step import ours

from .serve import serve

TAG = "saved"
CONSTANT = 96 << 20
"""What a process may take beside budgets and activations (docs/memory.md)."""


class Ours(ours.Ours):
    """The engine, which saves and loads by its own methods."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        super().__init__(work.model, settings)
        self._batches = work.tokens(0)
        self.change()

    def room(self) -> int:
        """What the plan took of the budgets, activations, and the constant."""
        from tiering.plan import Tier

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

    def fingerprint(self) -> list[float]:
        """Its count of steps, and a parameter, as bytes come and go with its moments."""
        import tiering

        parameters = dict(self.engine.module.named_parameters())
        with tiering.gathered(parameters[max(parameters)]) as parameter:
            return [float(self.engine.global_steps), float(parameter.double().sum())]


if __name__ == "__main__":
    serve(Ours)
