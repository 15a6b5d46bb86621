"""A usual PyTorch loop: a bf16 or fp32 model, fp32 masters, torch's AdamW, clipping by norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tiering.demo.settings import Settings


class PlainLoop:
    """Owns ``model``: copies fp32 masters from it, then converts it to the precision of the settings."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        names = [name for name, _ in model.named_parameters()]
        masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        self.masters = dict(zip(names, masters, strict=True))
        self.model = model.bfloat16() if settings.precision == "bf16" else model
        self.optimizer = torch.optim.AdamW(
            masters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def step(self, micro_batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Run one optimizer step, and return the mean loss over its micro-batches."""
        total = 0.0
        for tokens, targets in micro_batches:
            loss = self.model(tokens, targets)
            (loss / self.settings.accumulation).backward()
            total += loss.item() / self.settings.accumulation
            self._accumulate()
        nn.utils.clip_grad_norm_(self.masters.values(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.masters[name])
        return total

    def _accumulate(self) -> None:
        for name, parameter in self.model.named_parameters():
            master, gradient = self.masters[name], parameter.grad
            if gradient is None:
                continue
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None
