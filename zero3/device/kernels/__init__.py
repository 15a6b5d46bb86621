"""The optimizers' arithmetic on a device: for state and gradients that are in its memory.

The results have the bits of optim_cpu's kernels. There are two implementations: kernels.cu, which is compiled at its
first use and passes over memory once (fused.py), and torch operations, with about twenty passes, if it cannot be
compiled. All work is queued on the calling thread's stream of the tensors' device. Only ``added_up``, which returns
sums to the CPU, waits. Tensors are flat and contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim_cpu.kernels import ExactSum, add_block_sums
from zero3.device.kernels import cuda_library, fused, torch_operations
from zero3.device.kernels.segment import Segment
from zero3.device.kernels.torch_operations import ELEMENTS_AT_ONCE, block_count, join, round_parameters, split

__all__ = [
    "ELEMENTS_AT_ONCE",
    "Segment",
    "accumulate",
    "added_up",
    "block_squares",
    "join",
    "reduce",
    "round_parameters",
    "split",
    "step_segments",
    "sum_of_squares",
    "sums_of_squares",
]


def accumulate(target: Tensor, grad: Tensor, *, overwrite: bool) -> None:
    """``target`` = or += ``grad``, in float32, rounded once to the dtype of ``target``."""
    if overwrite and grad.dtype is target.dtype:
        target.copy_(grad)
    elif kernels := cuda_library.kernels_of(target):
        fused.accumulate(kernels, target, grad, overwrite=overwrite)
    else:
        torch_operations.accumulate(target, grad, overwrite=overwrite)


def reduce(target: Tensor, sources: Sequence[Tensor], factor: float, *, overwrite: bool) -> None:
    """``target`` = or += ``factor`` times the sum of ``sources``, which share a dtype: as optim_cpu's ``reduce``."""
    kernels = cuda_library.kernels_of(target)
    if kernels and len(sources) <= fused.MOST_SOURCES:
        fused.reduce(kernels, target, sources, factor, overwrite=overwrite)
    else:
        torch_operations.reduce(target, sources, factor, overwrite=overwrite)


def sum_of_squares(flat: Tensor) -> ExactSum:
    """The sum of squares of a tensor as ``optim_cpu.kernels.sum_of_squares`` computes it."""
    return sums_of_squares([flat])[0]


def sums_of_squares(flats: Sequence[Tensor]) -> list[ExactSum]:
    """``sum_of_squares`` of each of ``flats``, which are on one device. The CPU waits once.

    A sum is finite if and only if all elements of its tensor are finite.
    """
    return added_up(block_squares(flats))


def block_squares(flats: Sequence[Tensor]) -> list[Tensor]:
    """The float64 sums of squares of the blocks of each tensor, on the device. The CPU does not wait."""
    if not flats:
        return []
    counts = [block_count(flat) for flat in flats]
    sums = flats[0].new_empty(sum(counts), dtype=torch.float64)
    if kernels := cuda_library.kernels_of(sums):
        fused.block_squares(kernels, flats, sums)
    else:
        torch_operations.block_squares(flats, sums)
    return list(sums.split(counts))


def added_up(squares: Sequence[Tensor]) -> list[ExactSum]:
    """The sum of each of ``squares``, the results of ``block_squares``. The CPU waits once."""
    if not squares:
        return []
    counts = [len(each) for each in squares]
    parts = torch.cat(list(squares)).cpu().split(counts)
    return [add_block_sums(part.data_ptr(), len(part)) for part in parts]


def step_segments(segments: Sequence[Segment], grad_scale: float) -> None:
    """One step of each of ``segments``, on one device, in place, gradients multiplied by float32(``grad_scale``).

    Segments with one rule and the same dtypes share a launch, up to its maximum number of segments.
    """
    if not segments:
        return
    if kernels := cuda_library.kernels_of(segments[0].param):
        fused.step(kernels, segments, grad_scale)
        return
    for segment in segments:
        torch_operations.step(segment, grad_scale)
