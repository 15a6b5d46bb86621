"""Optimizers with DeepSpeed's constructors and defaults. They work with ``initialize``, and without an engine.

``DeepSpeedCPU...`` use the kernels of optim_cpu, ``FusedAdam`` torch's Adam. Options that no kernel supports raise
ConfigError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import optim_cpu
from tiering.errors import ConfigError

Betas = tuple[float, float]


class _ZeroGrad(torch.optim.Optimizer):
    """``zero_grad`` with a default: gradients become None, or with ``set_grad_none`` False zeros."""

    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(optim_cpu.Adam):
    """AdamW, or with ``adamw_mode`` False Adam with L2 decay; by default without decay, as in DeepSpeed."""

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
        _check(self, amsgrad, fp32_optimizer_states)
        super().__init__(
            *(model_params, lr, betas, eps, weight_decay),
            decoupled_weight_decay=adamw_mode,
            bias_correction=bool(bias_correction),
        )


class FusedAdam(_ZeroGrad, torch.optim.Adam):
    """AdamW, or with ``adam_w_mode`` False Adam with L2 decay; by default without decay, as in DeepSpeed.

    ``bias_correction=False`` is for ``initialize``: the optimizer's own ``step``, torch's, raises ConfigError.
    """

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
        _check(self, amsgrad)
        super().__init__(params, lr, betas, eps, weight_decay, decoupled_weight_decay=bool(adam_w_mode))
        self.set_grad_none = set_grad_none
        if not bias_correction:
            for group in self.param_groups:
                group["bias_correction"] = False
            self.register_step_pre_hook(_refuse_torchs_step)


class DeepSpeedCPULion(optim_cpu.Lion):
    """Lion; by default without decay, as in DeepSpeed."""

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
    """Lion; by default without decay, as in DeepSpeed. Without an engine it steps parameters on the CPU only."""

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
    """Adagrad; by default without decay, as in DeepSpeed."""

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


def _refuse_torchs_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise ConfigError(
        "FusedAdam(bias_correction=False).step() would be torch's Adam, which corrects the bias; pass the optimizer to"
        " initialize, or use DeepSpeedCPUAdam"
    )


def _check(optimizer: Any, amsgrad: bool = False, fp32_states: bool = True) -> None:
    name = type(optimizer).__name__
    if amsgrad:
        raise ConfigError(f"{name}(amsgrad=True) is not supported; use torch.optim.AdamW(amsgrad=True)")
    if not fp32_states:
        raise ConfigError(
            f'{name}(fp32_optimizer_states=False) is not supported: set "tiering": {{"state": "bf16"}} in the'
            " configuration to keep moments in 16 bits, and name the optimizer there"
        )
