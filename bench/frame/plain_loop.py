"""The common loop for mixed precision, in plain PyTorch. Standard library and torch only.

Compute parameters are a bf16 copy of the model, masters and both moments are fp32: 20 bytes per parameter. Each step:
forward and backward in bf16; gradients cast into fp32 buffers that are kept (``_foreach_copy_``); ``clip_grad_norm_``
over these; ``AdamW(fused=True)`` over the masters; masters copied back into the bf16 parameters (``_foreach_copy_``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .reference_model import ADAMW, CLIP
from .training import Trainer


class PlainLoop(Trainer):
    """Masters, their bf16 copy, and torch's fused AdamW over ``module``.

    ``free_gradients`` frees the bf16 gradients after each step, which is torch's default, instead of setting them to
    zero. Where the C library gives freed memory back to the system, freeing makes this loop twice as slow on a CPU.
    """

    def __init__(self, module: nn.Module, *, free_gradients: bool = False) -> None:
        self.masters = [parameter.detach().clone() for parameter in module.parameters()]
        self.model = module.bfloat16()
        self.parameters = list(self.model.parameters())
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.grads = [master.grad for master in self.masters]
        betas = tuple(ADAMW["betas"])
        self.optimizer = torch.optim.AdamW(self.masters, **(ADAMW | {"betas": betas}), fused=True)
        self.free_gradients = free_gradients

    def facts(self) -> dict[str, Any]:
        return {
            "about": f"torch {torch.__version__}, AdamW(fused=True), fp32 masters",
            "parameters": sum(master.numel() for master in self.masters),
        }

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        return loss

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_copy_(self.grads, [parameter.grad for parameter in self.parameters])
        self.model.zero_grad(set_to_none=self.free_gradients)
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
