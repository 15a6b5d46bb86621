"""16-bit parameters from float32 masters, for CPU tensors: rounded, or split without loss."""

from __future__ import annotations

import torch
from torch import Tensor

from optim_cpu import kernels


def round_parameters(master: Tensor, out: Tensor) -> None:
    """Set ``out`` to ``master`` rounded as the optimizers do: bfloat16 ties away from zero, other dtypes as torch.

    Both tensors have the same shape, are contiguous and on the CPU. With ties to even, a bfloat16 and 16 more bits
    could not represent every float32 (see ``csrc/kernels.h``). Except for ties, torch rounds to the same bfloat16.
    """
    if out.dtype is not torch.bfloat16 or master.dtype is torch.bfloat16:
        out.copy_(master)
        return
    wide = master.float().contiguous()
    _check(wide, out)
    kernels.split(out.data_ptr(), 0, wide.data_ptr(), wide.numel())


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 parameter and the int16 remainder of a float32 ``master``, of its shape.

    ``join`` restores the master bit for bit, except that every NaN becomes the quiet NaN.
    """
    wide = master.detach().contiguous()
    param = torch.empty_like(wide, dtype=torch.bfloat16)
    remainder = torch.empty_like(wide, dtype=torch.int16)
    _check(wide, param)
    kernels.split(param.data_ptr(), remainder.data_ptr(), wide.data_ptr(), wide.numel())
    return param, remainder


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master from the results of ``split``. Raises TypeError or ValueError for other tensors."""
    param, remainder = param.detach().contiguous(), remainder.contiguous()
    if param.dtype is not torch.bfloat16 or remainder.dtype is not torch.int16:
        raise TypeError(
            f"join: param is {param.dtype} and remainder {remainder.dtype}; they must be bfloat16 and int16"
        )
    master = torch.empty_like(param, dtype=torch.float32)
    _check(master, param)
    _check(master, remainder)
    kernels.join(master.data_ptr(), param.data_ptr(), remainder.data_ptr(), master.numel())
    return master


def _check(master: Tensor, half: Tensor) -> None:
    if master.dtype is not torch.float32:
        raise TypeError(f"the master is {master.dtype}; it must be float32")
    for tensor in (master, half):
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor is on {tensor.device}; it must be on the CPU")
    if master.shape != half.shape or not half.is_contiguous():
        raise ValueError(
            f"shapes {tuple(master.shape)} and {tuple(half.shape)} must be equal, and both contiguous"
        )
