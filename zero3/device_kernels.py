"""The optimizers' kernels as torch operations, for state that stays on a GPU.

Each torch operation rounds once, and IEEE multiplication, addition, division and square root have one right answer,
so these give the bits that optim_cpu's kernels give: the formulas, their order and the one NaN that is stored are
written in kernels.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from optim_cpu import kernels

BLOCK = 4096
LANES = 32
BLOCKS_AT_ONCE = 1024  # bounds the float64 temporaries to 64 MiB


class _Optimizer(IntEnum):
    """opt_rule.optimizer, as kernels.h numbers it."""

    ADAM = 0
    LION = 1
    ADAGRAD = 2
    SGD = 3


class _Decay(IntEnum):
    """opt_rule.decay_kind."""

    NONE = 0
    L2 = 1
    DECOUPLED = 2


Scalar = Callable[[str], float]  # a number of the rule, by its name in opt_rule


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
        out.copy_(upper.to(torch.int16).view(torch.bfloat16))
    else:
        out.copy_(master)
    out.masked_fill_(
        master.isnan(), math.nan
    )  # a GPU's cast has another NaN, and the sum above may have none


def step(
    rule: kernels.Rule,
    param: Tensor,
    state: Sequence[Tensor],
    grad: Tensor,
    *,
    out: Tensor | None,
    grad_scale: float,
) -> None:
    """One step by ``rule`` on flat float32 ``param`` and ``state``, in place; ``out`` receives the rounded parameter.

    As a segment of ``optim_cpu.kernels.StepBatch``; ``state`` may hold more tensors than the rule has.
    """
    scalar = rule.scalar
    # `decay` may have become 0, and 0 * inf is NaN in the C kernels, too: so not `if decay`.
    decay_kind, decay = _Decay(int(scalar("decay_kind"))), scalar("decay")
    g = grad.float() * (scalar("scale") * grad_scale)
    if decay_kind is _Decay.L2:
        g = g + param * decay
    kept = state[: rule.state_count]
    update = _UPDATES[_Optimizer(int(scalar("optimizer")))](kept, g, scalar)
    if decay_kind is _Decay.DECOUPLED:
        update = update + param * decay
    param.sub_(update)
    for tensor in (param, *kept):
        tensor.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)  # any NaN becomes the quiet one
    if out is not None:
        round_parameters(param, out)


def _adam(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    exp_avg, exp_avg_sq = state
    _move(exp_avg, g, scalar("beta1"), scalar("one_minus_beta1"))
    _move(exp_avg_sq, g * g, scalar("beta2"), scalar("one_minus_beta2"))
    return exp_avg / (exp_avg_sq.sqrt() * scalar("denominator_scale") + scalar("denominator_eps"))


def _lion(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    (exp_avg,) = state
    direction = exp_avg.clone()
    _move(direction, g, scalar("beta1"), scalar("one_minus_beta1"))
    _move(exp_avg, g, scalar("beta2"), scalar("one_minus_beta2"))
    own = (direction == 0) | direction.isnan()  # zeros and NaN are their own sign
    return torch.where(own, direction, direction.sign()) * scalar("step_size")


def _adagrad(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    (total,) = state
    total.add_(g * g)
    return g / (total.sqrt() + scalar("eps")) * scalar("step_size")


def _sgd(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    if not state:
        return g * scalar("step_size")
    (momentum_buffer,) = state
    momentum_buffer.mul_(scalar("carry")).add_(g * scalar("gain"))
    looked_ahead = g + momentum_buffer * scalar("momentum") if scalar("nesterov") else momentum_buffer
    return looked_ahead * scalar("step_size")


_UPDATES = {
    _Optimizer.ADAM: _adam,
    _Optimizer.LION: _lion,
    _Optimizer.ADAGRAD: _adagrad,
    _Optimizer.SGD: _sgd,
}


def _move(average: Tensor, new: Tensor, beta: float, one_minus_beta: float) -> None:
    """toward() of kernels.h, in place."""
    if beta >= 0.5:
        average.add_((new - average) * one_minus_beta)
    else:
        average.mul_(beta).add_(new * one_minus_beta)
