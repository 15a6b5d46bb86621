"""The formulas in float32 numpy and plain Python, from the documentation, for equality to the bit."""

from __future__ import annotations

import math

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
        g = grad * f(grad_scale)
        if decoupled:
            p = p * f(1 - lr * weight_decay)
        else:
            g = g + f(weight_decay) * p
        m = m * f(beta1) + g * f(1 - beta1)
        v = v * f(beta2) + (g * g) * f(1 - beta2)
        denom = np.sqrt(v) / f(math.sqrt(1 - beta2**step)) + f(eps)
        p = p - f(lr / (1 - beta1**step)) * (m / denom)
    assert p.dtype == m.dtype == v.dtype == np.float32
    return canonical(p), canonical(m), canonical(v)


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
