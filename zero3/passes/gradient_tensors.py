"""Gradients as tensors: taken from autograd, read in order, and added up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from optim_cpu import kernels
from optim_cpu.kernels import DType
from tiering.errors import ConfigError
from zero3.device import kernels as device_kernels
from zero3.params import resharded
from zero3.params.layout import Piece

COPIED_AT_ONCE = 1 << 20
"""Elements that are copied at once from a gradient that is not contiguous, on the CPU."""
KERNEL_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}


def pop_gradient(piece: Piece, param: nn.Parameter) -> Tensor | None:
    """Remove and return ``param.grad``, in any strides; None if there is none. ConfigError if it is sparse."""
    grad = resharded.take_gradient(param)
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {piece.name!r} is {grad.layout}; only dense gradients can be tiered:"
            " build the embedding with sparse=False"
        )
    return grad


def flat_parts(grad: Tensor) -> Iterator[Tensor]:
    """The elements of ``grad`` in order, flat: one view if it is contiguous, else copies of some rows at a time."""
    if grad.is_contiguous():
        yield grad.view(-1)
        return
    rows = max(1, COPIED_AT_ONCE * len(grad) // grad.numel())
    for start in range(0, len(grad), rows):
        yield grad[start : start + rows].reshape(-1)


def sum_parts(
    parts: list[Tensor], factor: float, target: Tensor, *, overwrite: bool, on_device: bool
) -> None:
    """Set the flat ``target`` to ``factor`` times the sum of ``parts``, or add that to it. In their order, in fp32.

    ``on_device``: all tensors are in device memory, and a kernel is queued on the calling thread's stream. Otherwise
    the CPU computes, and the sum is complete on return.
    """
    if on_device:
        device_kernels.reduce(target, parts, factor, overwrite=overwrite)
        return
    kernels.reduce(
        target.data_ptr(),
        KERNEL_DTYPES[target.dtype],
        [part.data_ptr() for part in parts],
        KERNEL_DTYPES[parts[0].dtype],
        target.numel(),
        factor,
        overwrite=overwrite,
    )
