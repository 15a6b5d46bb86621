"""The optimizers' kernels as torch operations, for any device: used on a GPU if kernels.cu cannot be compiled.

Each torch operation rounds once, and IEEE multiplication, addition, division and square root have one correct result,
so these operations give the bits of optim_cpu's kernels. kernels.h specifies the formulas, their order, the one NaN
that is stored, the formats and the hash of stochastic rounding. Unsigned integers of kernels.h are int64 here, or
masked, because torch lacks unsigned arithmetic on some devices.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.kernels import StateFormat
from zero3.device.kernels.segment import Segment

BLOCK = 4096
LANES = 32
BLOCKS_AT_ONCE = 1024  # bounds the float64 temporaries to 64 MiB
ELEMENTS_AT_ONCE = 1 << 24  # bounds the temporaries of a step: 64 MiB for each in float32, 128 MiB in int64

WORD, HALF_WORD = (1 << 64) - 1, (1 << 32) - 1
HALF_BF16 = 0x8000  # half of the last place of a bf16
LEAST_NORMAL, SCALE = 2.0**-126, 2.0**64


class _Decay(IntEnum):
    """opt_rule.decay_kind."""

    NONE = 0
    L2 = 1
    DECOUPLED = 2


Scalar = Callable[[str], float]  # a number of the rule, by its name in opt_rule


def block_count(flat: Tensor) -> int:
    """Number of blocks of squares of a tensor; the last one may be shorter."""
    return -(-flat.numel() // BLOCK)


def accumulate(target: Tensor, grad: Tensor, *, overwrite: bool) -> None:
    """``target`` = or += ``grad``, in float32, rounded once to the dtype of ``target``. Flat tensors."""
    if overwrite:
        target.copy_(grad)
    else:
        target.copy_(target.float().add_(grad.float()))


def reduce(target: Tensor, sources: Sequence[Tensor], factor: float, *, overwrite: bool) -> None:
    """``target`` = or += ``factor`` times the sum of ``sources``, in float32 and in their order, rounded once."""
    for start in range(0, target.numel(), ELEMENTS_AT_ONCE):
        part = slice(start, start + ELEMENTS_AT_ONCE)
        total = sources[0][part].to(torch.float32, copy=True)
        for source in sources[1:]:
            total.add_(source[part])
        accumulate(target[part], total.mul_(factor), overwrite=overwrite)


def block_squares(flats: Sequence[Tensor], sums: Tensor) -> None:
    """``sums`` = the sums of squares of the blocks of all tensors, in their order. Blocks are added in parallel."""
    work = sums.new_empty(min(len(sums), BLOCKS_AT_ONCE), BLOCK)
    filled = done = 0
    for flat in flats:
        first, count = 0, block_count(flat)
        while first < count:
            blocks = min(count - first, len(work) - filled)
            part = flat[first * BLOCK : (first + blocks) * BLOCK]
            room = work[filled : filled + blocks].view(-1)
            room[: part.numel()].copy_(part)
            room[part.numel() :].zero_()
            first, filled = first + blocks, filled + blocks
            if filled == len(work):
                _fold(work, sums[done : done + filled])
                done, filled = done + filled, 0
    if filled:
        _fold(work[:filled], sums[done:])


def _fold(blocks: Tensor, sums: Tensor) -> None:
    """``sums`` = the sum of squares of each row of ``blocks``, which are squared in place."""
    squares = blocks.square_().view(-1, BLOCK // LANES, LANES)
    lanes = torch.zeros_like(squares[:, 0])
    for row in range(squares.shape[1]):
        lanes += squares[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums.copy_(lanes[:, 0])


def round_parameters(master: Tensor, out: Tensor) -> None:
    """``out`` = ``master`` rounded as optim_cpu.formats.round_parameters does."""
    if out.dtype is torch.bfloat16:
        _round_bf16(master, out, HALF_BF16)
    else:
        out.copy_(master)
    # The cast of a GPU writes another NaN, and the sum in ``_round_bf16`` may write a number.
    out.masked_fill_(master.isnan(), math.nan)


def split(master: Tensor, param: Tensor, remainder: Tensor) -> None:
    """bfloat16 ``param`` and int16 ``remainder`` = both halves of float32 ``master``, as optim_cpu.kernels.split."""
    round_parameters(master, param)
    remainder.copy_(master.view(torch.int32).to(torch.int16))  # the lower half, as a signed number
    remainder.masked_fill_(master.isnan(), 0)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of the halves that ``split`` wrote."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def step(segment: Segment, grad_scale: float) -> None:
    """One step of ``segment``, in place, its gradient multiplied by float32(``grad_scale``)."""
    rule, remainder, out = segment.rule, segment.remainder, segment.out
    for start in range(0, segment.param.numel(), ELEMENTS_AT_ONCE):
        part = slice(start, start + ELEMENTS_AT_ONCE)
        param, state = segment.param[part], [tensor[part] for tensor in segment.used_state]
        master = param if remainder is None else join(param, remainder[part])
        wide_state = [tensor.float() for tensor in state]  # float32 is not copied: it is updated in place
        _step_fp32(rule, master, wide_state, segment.grad[part], grad_scale)
        if state and segment.state_format is not StateFormat.FP32:
            added = _added_below(rule, segment.state_format, segment.first_index + start, master)
            for tensor, values, below in zip(state, wide_state, added, strict=False):
                _round_bf16(values, tensor, below)
        if remainder is not None:
            split(master, param, remainder[part])
        if out is not None:
            round_parameters(master, out[part])


def _step_fp32(
    rule: kernels.Rule, param: Tensor, state: Sequence[Tensor], grad: Tensor, grad_scale: float
) -> None:
    def scalar(name: str) -> float:
        return flushed(rule.scalar(name))

    # `decay` may have become 0, and 0 * inf is NaN in the C kernels, too: so not `if decay`.
    decay_kind, decay = _Decay(int(scalar("decay_kind"))), scalar("decay")
    g = grad.to(torch.float32, copy=True)
    for tensor in (param, *state, g):
        _flush(tensor)
    g = _times(g, flushed(scalar("scale") * grad_scale))
    if decay_kind is _Decay.L2:
        g = _plus(g, _times(param, decay))
    update = _UPDATES[rule.name](state, g, scalar)
    if decay_kind is _Decay.DECOUPLED:
        update = _plus(update, _times(param, decay))
    param.copy_(_minus(param, update))
    for tensor in (param, *state):
        tensor.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)  # any NaN becomes the quiet one


def _round_bf16(values: Tensor, out: Tensor, below: int | Tensor) -> None:
    """``out`` = float32 ``values`` with ``below`` added to their bits, cut to bf16. A NaN must be the quiet one."""
    out.copy_(((values.view(torch.int32) + below) >> 16).to(torch.int16).view(torch.bfloat16))


def _added_below(
    rule: kernels.Rule, state_format: StateFormat, first_index: int, like: Tensor
) -> tuple[int | Tensor, int | Tensor]:
    """The ``below`` of ``_round_bf16`` for the first and the second state tensor, as long as ``like``."""
    if state_format is StateFormat.BF16:
        return HALF_BF16, HALF_BF16
    random = _random_bits(rule.key, first_index, like)
    return (random & 0xFFFF).to(torch.int32), (random >> 16).to(torch.int32)


def _random_bits(key: int, first_index: int, like: Tensor) -> Tensor:
    """random_bits() of numbers.inc: 32 bits for each element, as int64."""
    end = first_index + like.numel()
    wraps = range((first_index >> 32) + 1 << 32, end, 1 << 32)  # where the upper half of the index changes
    cuts = [first_index, *wraps, end]
    parts = []
    for start, stop in pairwise(cuts):
        mixed, low = mix(key + (start >> 32)), start & HALF_WORD
        x = torch.arange(low, low + stop - start, device=like.device) ^ (mixed & HALF_WORD)
        x = _times_modulo(x ^ (x >> 16), 0x21F0AAAD)
        x = _times_modulo(x ^ (x >> 15) ^ (mixed >> 32), 0xD35A2D97)
        parts.append(x ^ (x >> 15))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _times_modulo(x: Tensor, factor: int) -> Tensor:
    """Modulo 2**32. A factor above 2**31 is taken as negative, so that no product leaves int64."""
    return (x * (factor - (1 << 32) if factor >> 31 else factor)) & HALF_WORD


def mix(x: int) -> int:
    """splitmix64's finalizer."""
    x &= WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


# The operations of a step, which have no subnormals (kernels.h, rule 4).


def flushed(number: float) -> float:
    """``number`` as float32, or the zero of its sign if that is subnormal."""
    rounded = ctypes.c_float(number).value
    return math.copysign(0.0, rounded) if abs(rounded) < LEAST_NORMAL else rounded


def _flush(values: Tensor) -> Tensor:
    """Make subnormals zero, in place. A NaN times zero stays."""
    return values.mul_(values.abs() >= LEAST_NORMAL)


def _plus(a: Tensor, b: Tensor | float) -> Tensor:
    return _flush(a + b)


def _minus(a: Tensor, b: Tensor) -> Tensor:
    return _flush(a - b)


def _times(a: Tensor, b: Tensor | float) -> Tensor:
    return _flush_rounded(a * b, a * SCALE * b)


def _over(a: Tensor, b: Tensor) -> Tensor:
    return _flush_rounded(a / b, a * SCALE / b)


def _flush_rounded(values: Tensor, scaled: Tensor) -> Tensor:
    """Make ``values`` zero that are subnormal with 24 bits, which ``scaled`` ones have."""
    return values.mul_((scaled.abs() < LEAST_NORMAL * SCALE).logical_not_())


def _adam(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    exp_avg, exp_avg_sq = state
    exp_avg.copy_(_toward(exp_avg, g, scalar("beta1"), scalar("one_minus_beta1")))
    exp_avg_sq.copy_(_toward(exp_avg_sq, _times(g, g), scalar("beta2"), scalar("one_minus_beta2")))
    root = _times(exp_avg_sq.sqrt(), scalar("denominator_scale"))
    return _over(exp_avg, _plus(root, scalar("denominator_eps")))


def _lion(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    (exp_avg,) = state
    direction = _toward(exp_avg, g, scalar("beta1"), scalar("one_minus_beta1"))
    exp_avg.copy_(_toward(exp_avg, g, scalar("beta2"), scalar("one_minus_beta2")))
    own = (direction == 0) | direction.isnan()  # sign(0) is 0 and sign(NaN) is NaN
    return _times(torch.where(own, direction, direction.sign()), scalar("step_size"))


def _adagrad(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    (total,) = state
    total.copy_(_plus(total, _times(g, g)))
    return _times(_over(g, _plus(total.sqrt(), scalar("eps"))), scalar("step_size"))


def _sgd(state: Sequence[Tensor], g: Tensor, scalar: Scalar) -> Tensor:
    if state:
        (momentum_buffer,) = state
        momentum_buffer.copy_(_plus(_times(momentum_buffer, scalar("carry")), _times(g, scalar("gain"))))
        g = _plus(g, _times(momentum_buffer, scalar("momentum"))) if scalar("nesterov") else momentum_buffer
    return _times(g, scalar("step_size"))


_UPDATES = {"adam": _adam, "lion": _lion, "adagrad": _adagrad, "sgd": _sgd}


def _toward(average: Tensor, new: Tensor, beta: float, one_minus_beta: float) -> Tensor:
    """toward() of kernels.h."""
    if beta >= 0.5:
        return _plus(average, _times(_minus(new, average), one_minus_beta))
    return _plus(_times(average, beta), _times(new, one_minus_beta))
