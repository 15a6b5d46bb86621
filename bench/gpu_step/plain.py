"""Plain PyTorch with everything on the device: the loop that everyone writes for mixed precision.

Compute parameters are a bf16 copy of the model, masters and both moments are fp32: 20 bytes per parameter with the
gradients in both. Each step: forward and backward in bf16; gradients cast into fp32; ``clip_grad_norm_`` over these;
``AdamW(fused=True)`` over the masters; masters copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .serve import serve
from .work import ADAMW, CLIP, Work


class Plain:
    """Masters, their bf16 copy, and torch's fused AdamW."""

    def __init__(self, work: Work, settings: dict[str, Any]) -> None:
        module = work.build().to(work.device)
        self.masters = [parameter.detach().clone() for parameter in module.parameters()]
        self.model = module.bfloat16()
        self.parameters = list(self.model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.grads = [master.grad for master in self.masters]
        betas = tuple(ADAMW["betas"])
        self.optimizer = torch.optim.AdamW(self.masters, **(ADAMW | {"betas": betas}), fused=True)

    def facts(self) -> dict[str, Any]:
        return {
            "about": f"torch {torch.__version__}, AdamW(fused=True), fp32 masters",
            "parameters": sum(master.numel() for master in self.masters),
        }

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_copy_(self.grads, [parameter.grad for parameter in self.parameters])
        self.model.zero_grad()
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def settle(self) -> None:
        """Nothing is left behind."""

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Plain)
