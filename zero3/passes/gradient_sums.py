"""Sums of gradients: of several ranks, or of several uses."""

from __future__ import annotations

from torch import Tensor

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from zero3.device import kernels as device_kernels


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
        DTYPES[target.dtype],
        [part.data_ptr() for part in parts],
        DTYPES[parts[0].dtype],
        target.numel(),
        factor,
        overwrite=overwrite,
    )
