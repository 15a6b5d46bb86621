"""The order of a tensor's elements in memory. Kernels process memory in order, so tensors of a step must agree."""

from __future__ import annotations

import torch
from torch import Tensor


def _long_dims(tensor: Tensor) -> list[tuple[int, int]]:
    """Strides and sizes of the dimensions with more than one element; other strides have no effect."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each once, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_long_dims(tensor)):
        if stride != expected:
            return False
        expected *= size
    return True


def same_order(tensor: Tensor, param: Tensor) -> bool:
    """Whether ``tensor``, of the shape of dense ``param``, has the same order of elements."""
    return tensor.stride() == param.stride() or tensor.numel() == 0 or _long_dims(tensor) == _long_dims(param)


def in_order_of(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` if it has ``dtype`` and is on the CPU in the order of dense ``param``, else such a copy."""
    if tensor.dtype is dtype and tensor.device.type == "cpu" and same_order(tensor, param):
        return tensor
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(tensor)
