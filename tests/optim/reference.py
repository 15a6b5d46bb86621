"""The formulas of ``csrc/kernels.h`` in float32 numpy and plain Python, for equality to the bit.

Written from that page alone. numpy's float32 operations round once each, as the kernels must; what the page has in
double is a Python float here. A bfloat16 is a uint16.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from optim_cpu.exact_sum import UNIT, ExactSum

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Array = npt.NDArray[Any]
State = tuple[F32, ...]

BLOCK = 4096
LANES = 32
LEAST_NORMAL = 2.0**-126
WORD = (1 << 64) - 1
BEYOND_F32 = 2.0**128 - 2.0**103  # rounds to infinity

f32: Any = np.float32  # numpy's annotations take a float32 times an array of them for float64


# Optimizers: the arguments of the rule of the same name, after parameter, state and widened gradient; the new
# parameter and state.


def adam(
    p: F32, state: State, grad: F32, *, grad_scale: float, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int, decoupled: bool = True, bias_correction: bool = True, maximize: bool = False,
    seed: int = 0,
) -> tuple[F32, State]:  # fmt: skip
    g = scaled(grad, grad_scale, maximize)
    if not decoupled:
        g = l2(g, p, weight_decay)
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    size = lr / first
    m = toward(flush(state[0]), g, beta1)
    v = toward(flush(state[1]), times(g, g), beta2)
    correction = size * math.sqrt(second)
    if correction > 0 and 1 / correction < BEYOND_F32:
        u = over(m, plus(times(np.sqrt(v), scalar(1 / correction)), scalar(eps / size)))
    else:  # lr is 0, or nearly
        u = over(m, plus(times(np.sqrt(v), f32(0)), f32(math.inf)))
    return decayed_step(p, u, lr, weight_decay if decoupled else 0), (m, v)


def adamw(p: F32, m: F32, v: F32, grad: F32, **hyper: Any) -> tuple[F32, F32, F32]:
    """Adam's float32 case alone, NaN included."""
    with np.errstate(all="ignore"):
        p, state = adam(p, (m, v), grad, **hyper)
    return canonical(p), canonical(state[0]), canonical(state[1])


def lion(
    p: F32, state: State, grad: F32, *, grad_scale: float, lr: float, beta1: float, beta2: float, weight_decay: float,
    step: int, maximize: bool = False, seed: int = 0,
) -> tuple[F32, State]:  # fmt: skip
    g = scaled(grad, grad_scale, maximize)
    m = flush(state[0])
    u = times(sign(toward(m, g, beta1)), scalar(lr))
    return decayed_step(p, u, lr, weight_decay), (toward(m, g, beta2),)


def adagrad(
    p: F32, state: State, grad: F32, *, grad_scale: float, lr: float, lr_decay: float, eps: float, weight_decay: float,
    step: int, maximize: bool = False, seed: int = 0,
) -> tuple[F32, State]:  # fmt: skip
    g = l2(scaled(grad, grad_scale, maximize), p, weight_decay)
    s = plus(flush(state[0]), times(g, g))
    u = times(over(g, plus(np.sqrt(s), scalar(eps))), scalar(lr / (1 + (step - 1) * lr_decay)))
    return minus(flush(p), u), (s,)


def sgd(
    p: F32, state: State, grad: F32, *, grad_scale: float, lr: float, momentum: float, dampening: float, nesterov: bool,
    weight_decay: float, step: int, maximize: bool = False, seed: int = 0,
) -> tuple[F32, State]:  # fmt: skip
    g = l2(scaled(grad, grad_scale, maximize), p, weight_decay)
    if not momentum:
        return minus(flush(p), times(g, scalar(lr))), ()
    carry, gain = (0.0, 1.0) if step == 1 else (momentum, 1 - dampening)
    b = plus(times(flush(state[0]), scalar(carry)), times(g, scalar(gain)))
    d = plus(g, times(b, scalar(momentum))) if nesterov else b
    return minus(flush(p), times(d, scalar(lr))), (b,)


STATE_COUNT = {"adam": 2, "lion": 1, "adagrad": 1, "sgd": 1}


def scaled(grad: F32, grad_scale: float, maximize: bool) -> F32:
    return times(flush(grad), scalar(-grad_scale if maximize else grad_scale))


def l2(g: F32, p: F32, weight_decay: float) -> F32:
    return plus(g, times(flush(p), scalar(weight_decay))) if weight_decay else g


def toward(a: F32, b: F32, beta: float) -> F32:
    weight, rest = scalar(1 - beta), scalar(beta)
    return plus(a, times(minus(b, a), weight)) if rest >= 0.5 else plus(times(a, rest), times(b, weight))


def decayed_step(p: F32, u: F32, lr: float, weight_decay: float) -> F32:
    p = flush(p)
    return minus(p, plus(u, times(p, scalar(lr * weight_decay))) if weight_decay else u)


def sign(x: F32) -> F32:
    """Of a zero, that zero; of NaN, NaN."""
    return np.where(x == 0, x, np.sign(x))


# The operations of a step, without subnormals. In float64, products are exact, and of the quotients of two float32 none
# is so near to another float32, or to the middle of two, that its rounding could cross it.


def flush(x: F32) -> F32:
    """The zero of its sign in the place of a subnormal."""
    return np.where(np.abs(x) < np.float32(LEAST_NORMAL), np.copysign(np.float32(0), x), x)


def _of_exact(x: npt.NDArray[np.float64]) -> F32:
    """Rounded to float32; zero if with 24 bits, wherever its exponent is, it is a subnormal."""
    rounded = x.astype(np.float32)
    return np.where(np.abs(x) < LEAST_NORMAL - 2.0**-151, np.copysign(np.float32(0), rounded), rounded)


def scalar(x: float) -> Any:
    return flush(f32(x))[()]


def plus(a: F32, b: F32) -> F32:
    return flush(a + b)


def minus(a: F32, b: F32) -> F32:
    return flush(a - b)


def times(a: F32, b: F32) -> F32:
    return _of_exact(np.multiply(a, b, dtype=np.float64))


def over(a: F32, b: F32) -> F32:
    return _of_exact(np.divide(a, b, dtype=np.float64))


# Formats.


def bf16_to_f32(x: U16) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _bf16(x: F32, is_up: Array) -> U16:
    """The bfloat16 next to x towards zero, or if `is_up` the one after it."""
    return ((x.view(np.uint32) >> 16) + is_up.astype(np.uint32)).astype(np.uint16)


def _rest(x: F32) -> Array:
    return x.view(np.uint32) & np.uint32(0xFFFF)


def f32_to_bf16(x: F32) -> U16:
    """Nearest even, by comparing the rest with one half; a NaN keeps its upper bits, made quiet."""
    odd = (x.view(np.uint32) >> 16) & 1
    up = (_rest(x) > 0x8000) | ((_rest(x) == 0x8000) & (odd == 1))
    quiet = ((x.view(np.uint32) >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, _bf16(x, up)).astype(np.uint16)


def f32_to_bf16_away(x: F32) -> U16:
    """Nearest, ties away from zero: parameters, and state unless stochastic."""
    return _bf16(x, _rest(x) >= 0x8000)


def f32_to_bf16_by_chance(x: F32, random: Array) -> U16:
    """Up in `rest` of 65536 cases, for 16 random bits that are equally likely."""
    return _bf16(x, _rest(x) + random >= 0x10000)


def canonical(x: F32) -> F32:
    """The one quiet NaN in place of whichever NaN the hardware made."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).view(np.float32)


def round_parameter(x: F32, to_bf16: bool) -> Array:
    """As optimizers write 16-bit parameters: bf16 with ties away from zero, else fp16 with ties to even."""
    if to_bf16:
        return f32_to_bf16_away(canonical(x))
    with np.errstate(all="ignore"):
        return x.astype(np.float16)


def split(x: F32) -> tuple[U16, npt.NDArray[np.int16]]:
    x = canonical(x)
    upper = f32_to_bf16_away(x)
    remainder = x.view(np.uint32).astype(np.int64) - (upper.astype(np.int64) << 16)
    assert ((remainder >= -(1 << 15)) & (remainder < 1 << 15)).all()
    return upper, remainder.astype(np.int16)


def join(upper: U16, remainder: npt.NDArray[np.int16]) -> F32:
    bits = (upper.astype(np.int64) << 16) + remainder
    return (bits % (1 << 32)).astype(np.uint32).view(np.float32)


def _mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def random_bits(seed: int, step: int, first_index: int, n: int) -> npt.NDArray[np.uint32]:
    index = np.arange(n, dtype=np.uint64) + np.uint64(first_index)
    upper = (index >> np.uint64(32)).astype(np.int64)
    random = np.empty(n, np.uint32)
    for high in np.unique(upper):
        key = _mix(_mix((_mix(seed & WORD) + step) & WORD) + int(high) & WORD)
        x = index[upper == high].astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)
        x = (x ^ x >> 16) * np.uint32(0x21F0AAAD)
        x = (x ^ x >> 15 ^ np.uint32(key >> 32)) * np.uint32(0xD35A2D97)
        random[upper == high] = x ^ x >> 15
    return random


# Sums.


def reduce(sources: list[F32], factor: float, before: F32 | None) -> F32:
    """Of all ranks' gradients, added to `before` if there is one; not yet rounded to the target's type."""
    with np.errstate(all="ignore"):
        total = sources[0]
        for x in sources[1:]:
            total = total + x
        scaled: F32 = total * f32(factor)
        return canonical(scaled if before is None else before + scaled)


def sum_of_squares(x: F32) -> ExactSum:
    """Fractions add up the sums of blocks, without rounding."""
    total, infinite, nan = Fraction(), 0, 0
    with np.errstate(all="ignore"):
        for start in range(0, len(x), BLOCK):
            block = x[start : start + BLOCK].astype(np.float64)
            rows = np.zeros((-(-len(block) // LANES), LANES))
            rows.reshape(-1)[: len(block)] = block
            lanes = np.zeros(LANES)
            for row in rows:
                lanes = lanes + row * row
            for half in (16, 8, 4, 2, 1):
                lanes = lanes[:half] + lanes[half:]
            if np.isfinite(lanes[0]):
                total += Fraction(float(lanes[0]))
            else:
                infinite, nan = infinite + bool(np.isinf(lanes[0])), nan + bool(np.isnan(lanes[0]))
    units = total * UNIT
    assert units.denominator == 1
    return ExactSum(units.numerator, infinite, nan)


# Values that break things.

SPECIAL_BITS = """
    00000000 80000000 00000001 807FFFFF 00800000 7F7FFFFF FF7FFFFF 7F800000 FF800000 7FC00000
    FFC12345 7F812345 3F800000 3F808000 3F818000 7F7F8000 7F7F7FFF 80000001 00008000
"""
SPECIAL_F32 = np.array([int(word, 16) for word in SPECIAL_BITS.split()], np.uint32)


def adversarial(rng: np.random.Generator, n: int) -> F32:
    """Signs and exponents over all of float32, with zeros, subnormals, infinities and NaN mixed in."""
    x = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    x[np.isnan(x.view(np.float32))] &= np.uint32(0xBFFFFFFF)
    at = rng.random(n) < 0.15
    x[at] = rng.choice(SPECIAL_F32, int(at.sum()))
    return x.view(np.float32)
