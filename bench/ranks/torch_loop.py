"""What the sides in plain PyTorch share: a loop with gradients clipped as ours are, and no counters but the CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from frame.process import cpu_seconds
from frame.reference_model import ADAMW, CLIP
from frame.training import Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FUSED_ADAMW: dict[str, Any] = {**ADAMW, "betas": tuple(ADAMW["betas"]), "fused": True}


class TorchLoop(Trainer):
    """Trains ``model`` with ``optimizer``. ``numel`` counts the whole model's elements."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, numel: int) -> None:
        self.model = model
        self.optimizer = optimizer
        self.numel = numel

    def facts(self) -> dict[str, Any]:
        return {"parameters": self.numel}

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        return loss

    def update(self) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def counters(self) -> dict[str, float]:
        return {"cpu": cpu_seconds()}
