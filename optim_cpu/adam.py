"""Adam and AdamW on flat torch tensors: checks, then one fused pass over the CPU's memory."""

from __future__ import annotations

import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType, StepBatch

_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


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
    """One AdamW step (``decoupled=False``: Adam with L2), in place, as ``csrc/kernels.h`` writes it down.

    All tensors are contiguous, on the CPU, and of ``master``'s shape. ``master``, ``exp_avg`` and
    ``exp_avg_sq`` are float32; ``grad`` and ``out`` are float32, bfloat16 or float16. ``out`` receives the
    new parameter rounded to its dtype; it may be ``grad`` itself, and otherwise shares no memory with the
    rest. ``grad`` is multiplied by float32(``grad_scale``) first. ``step`` is the number of the step taken,
    from 1.

    Raises ValueError naming the tensor or the hyperparameter, and TypeError for a wrong dtype.
    """
    for name, tensor in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check(name, tensor, master.shape, (torch.float32,))
    _check("grad", grad, master.shape, tuple(_DTYPES))
    if out is not None:
        _check("out", out, master.shape, tuple(_DTYPES))
    batch = StepBatch()
    rule = kernels.adam(
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
        grad_dtype=_DTYPES[grad.dtype],
        out=0 if out is None else out.data_ptr(),
        out_dtype=DType.FP32 if out is None else _DTYPES[out.dtype],
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
