"""The optimizer's kernels as torch operations, for state that stays on a GPU.

Each torch operation rounds once, and IEEE multiplication, addition, division and square root have one right answer,
so these give the bits that optim_cpu's kernels give: the formulas and their order are written in kernels.h.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096
LANES = 32
BLOCKS_AT_ONCE = 1024  # bounds the float64 temporaries to 64 MiB


class AdamWNumbers(NamedTuple):
    """One parameter's hyperparameters at one step; ``step`` counts from 1."""

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


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    out: Tensor | None,
    numbers: AdamWNumbers,
    grad_scale: float,
) -> None:
    """One step on flat float32 ``master``, ``exp_avg`` and ``exp_avg_sq``; ``out`` receives the rounded master."""
    n = numbers
    g = grad.float() * grad_scale
    if n.decoupled:
        master.mul_(1 - n.lr * n.weight_decay)
    else:
        g = g + master * n.weight_decay
    exp_avg.mul_(n.beta1).add_(g * (1 - n.beta1))
    exp_avg_sq.mul_(n.beta2).add_((g * g) * (1 - n.beta2))
    # A divisor on the device: torch divides by a Python number through its reciprocal, which rounds twice.
    correction = torch.full((), math.sqrt(1 - n.beta2**n.step), device=master.device)
    denominator = (exp_avg_sq.sqrt() / correction).add_(n.eps)
    master.sub_((exp_avg / denominator) * (n.lr / (1 - n.beta1**n.step)))
    if out is not None:
        out.copy_(master)
