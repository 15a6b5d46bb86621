"""Adam and AdamW: optimizers like those of torch.optim, and a function that steps flat tensors of the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optim_cpu import rules
from optim_cpu.dtypes import DTYPES
from optim_cpu.fused_optimizer import FusedOptimizer, Params
from optim_cpu.kernels import DType, StepBatch


class Adam(FusedOptimizer):
    """Adam with L2 decay or, on request, decoupled decay, as torch.optim.Adam; ``amsgrad`` is not supported.

    ``bias_correction=False`` does not correct the moments for their start at zero.
    State: step, exp_avg, exp_avg_sq. ``FusedOptimizer`` describes ``state_format``, ``stochastic_rounding``, ``seed``.
    """

    update_rule = rules.ADAM

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        bias_correction: bool = True,
        state_format: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "bias_correction": bias_correction,
            "state_format": state_format,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        super().__init__(params, defaults)


class AdamW(Adam):
    """Adam with decoupled weight decay, as torch.optim.AdamW; see ``Adam``."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        bias_correction: bool = True,
        state_format: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            bias_correction=bias_correction,
            state_format=state_format,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            # Checkpoints of older versions of torch do not have the key.
            group["decoupled_weight_decay"] = True
        super().__setstate__(state)


# Four tensors, the kernel's output and its hyperparameters: the function form of a step, as torch.optim.adam.adam is.
def step_adamw(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
) -> None:
    """One AdamW step (``decoupled=False``: Adam with L2) in place, with the formulas of ``csrc/kernels.h``.

    All tensors are contiguous, on the CPU, and of ``master``'s shape. ``master``, ``exp_avg`` and
    ``exp_avg_sq`` are float32; ``grad`` and ``out`` are float32, bfloat16 or float16. ``out`` receives the
    new parameter rounded to its dtype; it may be ``grad`` itself, but must not share memory with another
    tensor. ``grad`` is multiplied by float32(``grad_scale``) first. ``step`` is the number of this step,
    from 1.

    Raises ValueError, which names the tensor or the hyperparameter, and TypeError for a wrong dtype.
    """
    for name, tensor in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check(name, tensor, master.shape, (torch.float32,))
    _check("grad", grad, master.shape, tuple(DTYPES))
    if out is not None:
        _check("out", out, master.shape, tuple(DTYPES))
    batch = StepBatch()
    rule = rules.adam(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        decoupled=decoupled,
    )
    batch.add(
        master.numel(),
        batch.add_rule(rule),
        param=master.data_ptr(),
        state=(exp_avg.data_ptr(), exp_avg_sq.data_ptr()),
        grad=grad.data_ptr(),
        grad_dtype=DTYPES[grad.dtype],
        out=0 if out is None else out.data_ptr(),
        out_dtype=DType.FP32 if out is None else DTYPES[out.dtype],
    )
    batch.run(grad_scale)


def _check(name: str, tensor: torch.Tensor, shape: torch.Size, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"step_adamw: {name} is on {tensor.device}; it must be on the CPU")
    if tensor.dtype not in dtypes:
        raise TypeError(f"step_adamw: {name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.shape != shape:
        raise ValueError(f"step_adamw: {name} has shape {tuple(tensor.shape)}, but master has {tuple(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"step_adamw: {name} is not contiguous (strides {tensor.stride()}); its memory is walked flat, "
            "so pass a contiguous tensor"
        )
