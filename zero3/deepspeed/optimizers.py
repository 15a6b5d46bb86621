"""Optimizers with DeepSpeed's constructors and defaults. ``initialize`` takes them over, and they work by themselves.

``DeepSpeedCPU...`` step with the kernels of optim_cpu, ``FusedAdam`` with torch's own Adam. What their constructors
offer and no kernel does is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import optim_cpu
from tiering.errors import ConfigError

Betas = tuple[float, float]


class _ZeroGrad(torch.optim.Optimizer):
    """What ``zero_grad`` leaves where nobody says: None, or with ``set_grad_none`` False zeros."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(optim_cpu.Adam):
    """AdamW, or with ``adamw_mode`` False Adam with L2 decay; without decay unless asked, as DeepSpeed's."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(self, amsgrad, bias_correction, fp32_optimizer_states)
        super().__init__(model_params, lr, betas, eps, weight_decay, decoupled_weight_decay=adamw_mode)


class FusedAdam(_ZeroGrad, torch.optim.Adam):
    """AdamW, or with ``adam_w_mode`` False Adam with L2 decay; without decay unless asked, as DeepSpeed's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(self, amsgrad, bias_correction)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=bool(adam_w_mode))
        self.set_grad_none = set_grad_none


class DeepSpeedCPULion(optim_cpu.Lion):
    """Lion; without decay unless asked, as DeepSpeed's."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(self, fp32_states=fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(_ZeroGrad, optim_cpu.Lion):
    """Lion; without decay unless asked, as DeepSpeed's. By itself it steps parameters on the CPU alone."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
        self.set_grad_none = set_grad_none


class DeepSpeedCPUAdagrad(optim_cpu.Adagrad):
    """Adagrad; without decay unless asked, as DeepSpeed's."""

    def __init__(
        self,
        model_params: ParamsT,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check(self, amsgrad, fp32_states=fp32_optimizer_states)
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


def _check(
    optimizer: Any, amsgrad: bool = False, bias_correction: bool = True, fp32_states: bool = True
) -> None:
    name = type(optimizer).__name__
    if amsgrad:
        raise ConfigError(f"{name}(amsgrad=True): no kernel does that; use torch.optim.AdamW(amsgrad=True)")
    if not bias_correction:
        raise ConfigError(f"{name}(bias_correction=False): no kernel leaves it out; leave the argument out")
    if not fp32_states:
        raise ConfigError(
            f'{name}(fp32_optimizer_states=False): set "tiering": {{"state": "bf16"}} in the configuration to keep'
            " moments in 16 bits, and name the optimizer there"
        )
