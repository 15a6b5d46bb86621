"""The loop that everyone writes for mixed precision (frame/plain_loop.py), alone or under torch's save_on_cpu.

``settings``: ``save_on_cpu``. With ``pin_memory``: without it, ``save_on_cpu`` copies nothing on a CPU.
"""

from __future__ import annotations

from typing import Any

from frame.plain_loop import PlainLoop
from frame.reference_model import Model
from frame.training import serve_training
from torch import Tensor
from torch.autograd.graph import save_on_cpu


class Saving(PlainLoop):
    """What autograd saves is copied to tensors of their own."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=True):
            return super().forward(tokens, targets)


def build(model: Model, settings: dict[str, Any]) -> PlainLoop:
    return (Saving if settings["save_on_cpu"] else PlainLoop)(model.build())


if __name__ == "__main__":
    serve_training(build)
