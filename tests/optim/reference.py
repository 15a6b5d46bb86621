"""The formulas in float32 numpy and plain Python, from the documentation, for equality to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

BLOCK = 4096
LANES = 32


def bf16_to_f32(x: npt.NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Nearest even, by comparing the rest with one half: no bit trick shared with the kernels."""
    bits = x.view(np.uint32)
    down = bits & np.uint32(0xFFFF0000)
    rest = (bits & np.uint32(0xFFFF)).astype(np.int64)
    odd = (down >> 16) & 1
    up = (rest > 0x8000) | ((rest == 0x8000) & (odd == 1))
    result = ((down.astype(np.uint64) + (up.astype(np.uint64) << 16)) >> 16).astype(np.uint16)
    quiet = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, result).astype(np.uint16)


def canonical(x: F32) -> F32:
    """The one quiet NaN in place of whichever NaN the hardware made."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).astype(np.uint32).view(np.float32)


def adamw(
    p: F32, m: F32, v: F32, grad: F32, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, step: int, grad_scale: float, decoupled: bool,
) -> tuple[F32, F32, F32]:  # fmt: skip
    """One step; numpy's float32 operations round once each, as the kernels must."""
    f = np.float32
    with np.errstate(all="ignore"):
        size = lr / (1 - beta1**step)
        g = grad * f(grad_scale)
        if not decoupled and weight_decay:
            g = g + f(weight_decay) * p
        m = toward(m, g, beta1)
        v = toward(v, g * g, beta2)
        if size:
            scale, small = f(1 / (size * math.sqrt(1 - beta2**step))), f(eps / size)
        else:
            scale, small = f(0), f(math.inf)
        u = m / (np.sqrt(v) * scale + small)
        if decoupled and weight_decay:
            u = u + f(lr * weight_decay) * p
        p = p - u
    assert p.dtype == m.dtype == v.dtype == np.float32
    return canonical(p), canonical(m), canonical(v)


def toward(a: F32, b: F32, beta: float) -> F32:
    if np.float32(beta) >= 0.5:
        return a + (b - a) * np.float32(1 - beta)
    return a * np.float32(beta) + b * np.float32(1 - beta)


def round_parameter(x: F32, to_bf16: bool) -> npt.NDArray[Any]:
    """As optimizers write 16-bit parameters: bf16 with ties away from zero, else fp16 with ties to even."""
    if not to_bf16:
        with np.errstate(all="ignore"):
            return x.astype(np.float16)
    bits = canonical(x).view(np.uint32).astype(np.int64)
    down = bits >> 16
    return (down + ((bits & 0xFFFF) >= 0x8000)).astype(np.uint16)


def sum_of_squares(x: F32, initial: float = 0.0) -> float:
    total = initial
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
            total = total + float(lanes[0])
    return total


def adversarial(rng: np.random.Generator, n: int) -> F32:
    """Signs and exponents over all of float32, with zeros, subnormals, infinities and NaN mixed in."""
    x = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    x[np.isnan(x.view(np.float32))] &= np.uint32(0xBFFFFFFF)
    special = np.array(
        [0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
         0xFFC12345, 0x7F812345, 0x3F800000, 0x3F808000, 0x3F818000],
        dtype=np.uint32,
    )  # fmt: skip
    at = rng.random(n) < 0.15
    x[at] = rng.choice(special, int(at.sum()))
    return x.view(np.float32)
