"""The optimizer's kernels as torch operations, for state that stays on a GPU.

Each torch operation rounds once, and IEEE multiplication, addition, division and square root have one right answer,
so these give the bits that optim_cpu's kernels give: the formulas and their order are written in kernels.h.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from optim_cpu import kernels

BLOCK = 4096
LANES = 32
BLOCKS_AT_ONCE = 1024  # bounds the float64 temporaries to 64 MiB


class AdamOptions(NamedTuple):
    """One parameter's hyperparameters at one step, as ``optim_cpu.kernels.adam`` takes them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool


def accumulate(target: Tensor, grad: Tensor, *, overwrite: bool) -> None:
    """``target`` = or += ``grad``, in float32, rounded once to the dtype of ``target``. Flat tensors."""
    if overwrite:
        target.copy_(grad)
    else:
        target.copy_(target.float().add_(grad.float()))


def sum_of_squares(flat: Tensor) -> float:
    """The float64 sum of squares of a flat tensor in the fixed order: lanes, their tree, blocks by index."""
    total = 0.0
    for chunk in flat.split(BLOCK * BLOCKS_AT_ONCE):
        padded = torch.nn.functional.pad(chunk.double(), (0, -chunk.numel() % BLOCK))
        squares = padded.view(-1, BLOCK // LANES, LANES).square_()
        lanes = torch.zeros_like(squares[:, 0])
        for row in range(squares.shape[1]):
            lanes += squares[:, row]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        for block in lanes.flatten().tolist():
            total += block
    return total


def round_parameters(master: Tensor, out: Tensor) -> None:
    """``out`` = ``master`` rounded as optim_cpu.formats.round_parameters does."""
    if out.dtype is torch.bfloat16:
        upper = (master.view(torch.int32) + 0x8000) >> 16
        rounded = upper.to(torch.int16).view(torch.bfloat16)
        out.copy_(torch.where(master.isnan(), math.nan, rounded))
    else:
        out.copy_(master)


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    options: AdamOptions,
    grad_scale: float,
) -> None:
    """One step on flat float32 ``master``, ``exp_avg`` and ``exp_avg_sq``; ``out`` receives the rounded master."""
    scalar = kernels.adam(**options._asdict()).scalar
    decay = scalar("decay")
    g = grad.float() * grad_scale
    decays = options.weight_decay != 0  # `decay` may have become 0, and 0 * inf is NaN in the C kernels, too
    if decays and not options.decoupled:
        g = g + master * decay
    _move(exp_avg, g, scalar("beta1"), scalar("one_minus_beta1"))
    _move(exp_avg_sq, g * g, scalar("beta2"), scalar("one_minus_beta2"))
    update = exp_avg / (exp_avg_sq.sqrt() * scalar("denominator_scale") + scalar("denominator_eps"))
    if decays and options.decoupled:
        update = update + master * decay
    master.sub_(update)
    if out is not None:
        round_parameters(master, out)


def _move(average: Tensor, new: Tensor, beta: float, one_minus_beta: float) -> None:
    """toward() of kernels.h, in place."""
    if beta >= 0.5:
        average.add_((new - average) * one_minus_beta)
    else:
        average.mul_(beta).add_(new * one_minus_beta)
