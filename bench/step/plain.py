"""The loop that everyone writes for mixed precision, in plain PyTorch.

Compute parameters are a bf16 copy of the model, masters and both moments are fp32. Each step: forward and backward in
bf16; gradients cast into fp32 buffers that are kept (``_foreach_copy_``), and set to zero; ``clip_grad_norm_`` at 1.0
over the fp32 gradients; ``AdamW(fused=True)`` over the masters; masters copied back into the bf16 parameters
(``_foreach_copy_``). 20 bytes per parameter. Gradients are zeroed and not freed, although torch's default is to free
them: where the C library gives freed memory back to the system, taking it anew makes this loop twice as slow.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from .reference import ADAMW, CLIP, Model
from .serve import serve


class Plain:
    """Masters, their bf16 copy, and torch's fused AdamW."""

    def __init__(self, model: Model, settings: dict[str, Any]) -> None:
        module = model.build()
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
        self.model.zero_grad(set_to_none=False)
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)

    def settle(self) -> float:
        return time.perf_counter()

    def counters(self) -> dict[str, float]:
        return {}

    def trace(self, path: str) -> None:
        raise NotImplementedError("plain PyTorch has no trace of its transfers")

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Plain)
