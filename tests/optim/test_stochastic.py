"""Stochastic rounding of bfloat16 state: exact in the mean, decided by seed, step and index alone, and why it is there.

With both betas 0, Adam's state after a step is g and g * g: whatever is to be rounded goes in as a gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from optim_cpu import kernels
from optim_cpu.kernels import DType, StateFormat, StepBatch

from . import reference
from .cases import address, same_bits
from .reference import F32, U16, Array

N = 1 << 16
SIGMAS = 6  # one in 10^9 by chance; nothing here is drawn anew from run to run
ROUND_ONLY: dict[str, Any] = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 1.0, "weight_decay": 0.0}


def rounded(x: F32, *, seed: int = 1, step: int = 1, first_index: int = 0) -> tuple[U16, U16]:
    """x and x * x, as exp_avg and exp_avg_sq round them."""
    n = len(x)
    p, m, v = np.zeros(n, np.float32), np.zeros(n, np.uint16), np.zeros(n, np.uint16)
    batch = StepBatch()
    rule = batch.add_rule(kernels.adam(**ROUND_ONLY, step=step, seed=seed))
    state: dict[str, Any] = {"state": (address(m), address(v)), "state_format": StateFormat.BF16_STOCHASTIC}
    grad: dict[str, Any] = {"grad": address(x), "grad_dtype": DType.FP32}
    batch.add(n, rule, param=address(p), **state, **grad, first_index=first_index)
    batch.run()
    return m, v


def with_rest(upper: int, rest: int, n: int = N) -> F32:
    """A float32 that lies rest / 65536 of the way between two neighbouring bfloat16."""
    return np.full(n, upper << 16 | rest, np.uint32).view(np.float32)


def ups(x: F32, rounded_up: U16) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which were rounded away from zero; all others were cut."""
    down = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert ((rounded_up == down) | (rounded_up == down + 1)).all()
    return np.asarray(rounded_up != down)


def assert_share(hits: int, n: int, share: float) -> None:
    bound = SIGMAS * np.sqrt(n * share * (1 - share)) + 1e-9
    assert abs(hits - n * share) <= bound, f"{hits} of {n}, expected {n * share:.0f} within {bound:.0f}"


HALF = with_rest(0x3F80, 0x8000)


@pytest.mark.parametrize("upper", [0x3F80, 0xBF80, 0x0080, 0x0081, 0x8081, 0x7F7F, 0x4049])
def test_a_number_is_rounded_up_as_often_as_it_is_near(upper: int) -> None:
    for i, rest in enumerate([0, 1, 2, 100, 0x1000, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFF0, 0xFFFF]):
        x = with_rest(upper, rest)
        m, _ = rounded(x, seed=i)
        assert_share(int(ups(x, m).sum()), N, rest / 65536)


def test_the_mean_of_ordinary_numbers_is_kept() -> None:
    """Over two million roundings of both arrays the error has mean 0 within what its spread allows."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal(1 << 21, dtype=np.float32)
    for exact, result in zip((x, x * x), rounded(x), strict=True):
        error = reference.bf16_to_f32(result).astype(np.float64) - exact
        assert abs(error.mean()) <= SIGMAS * error.std() / np.sqrt(len(x))
        assert error.std() > 1e-4
    plain = reference.bf16_to_f32(reference.f32_to_bf16(x)).astype(np.float64) - x
    assert error.std() < 4 * plain.std()  # and it costs no more than it must


def test_both_arrays_round_by_bits_of_their_own() -> None:
    # x is a quarter of the way to the next value; its square is halfway.
    x = np.full(N, np.sqrt(np.float32(1 + 2.0**-8)), np.float32)
    share = [int(exact.view(np.uint32)[0] & 0xFFFF) / 65536 for exact in (x, x * x)]
    assert 0.2 < share[0] < 0.3 and share[1] == 0.5
    up = [ups(exact, result) for exact, result in zip((x, x * x), rounded(x), strict=True)]
    for u, p in zip(up, share, strict=True):
        assert_share(int(u.sum()), N, p)
    assert_share(int((up[0] & up[1]).sum()), N, share[0] * share[1])


def test_neighbours_steps_and_seeds_are_independent() -> None:
    """Each decides as if a coin were thrown: pairs agree in half of the cases."""
    base = ups(HALF, rounded(HALF)[0])
    for shift in (1, 2, 16, 32, 1024, 32768):
        assert_share(int((base[shift:] == base[:-shift]).sum()), N - shift, 0.5)
    others: list[dict[str, int]] = [{"step": 2}, {"step": 3}, {"step": 1 << 40}, {"seed": 2}, {"seed": 0}]
    others += [
        {"seed": (1 << 64) - 1},
        {"seed": 1 + (1 << 32)},
        {"first_index": 1 << 32},
        {"first_index": 1 << 33},
    ]
    drawn = [base, *(ups(HALF, rounded(HALF, **other)[0]) for other in others)]
    for a, b in itertools.combinations(drawn, 2):
        assert_share(int((a == b).sum()), N, 0.5)


def test_seed_plus_step_is_not_all_that_counts() -> None:
    """Step t of one seed is not step t + 1 of the seed before."""
    for difference in (1, 2, 1000):
        a = ups(HALF, rounded(HALF, seed=7, step=1 + difference)[0])
        b = ups(HALF, rounded(HALF, seed=7 + difference, step=1)[0])
        assert_share(int((a == b).sum()), N, 0.5)


def test_one_element_over_its_steps() -> None:
    """The mean that an average sees is that over time."""
    x = with_rest(0x3F80, 0x3000, 64)
    drawn = np.array([ups(x, rounded(x, step=t)[0]) for t in range(1, 4001)])
    assert_share(int(drawn.sum()), drawn.size, 0x3000 / 65536)
    worst = np.abs(drawn.mean(0) - 0x3000 / 65536).max()
    assert worst <= SIGMAS * np.sqrt(0.1875 * 0.8125 / 4000)
    changes = (drawn[1:] != drawn[:-1]).sum()
    assert_share(int(changes), drawn[1:].size, 2 * 0.1875 * 0.8125)


def test_the_same_again_wherever_it_lies(isa: str) -> None:
    x = reference.adversarial(np.random.default_rng(3), N)
    x[np.isnan(x)] = 1
    first = (1 << 32) - 1000
    whole = rounded(x, first_index=first)
    for threads in (1, 3):
        kernels.set_thread_count(threads)
        assert all(same_bits(a, b) for a, b in zip(rounded(x, first_index=first), whole, strict=True))
    for begin, end in ((0, 999), (999, 1001), (1000, 40_000), (77, 78)):
        part = rounded(x[begin:end].copy(), first_index=first + begin)
        assert all(same_bits(a, b[begin:end]) for a, b in zip(part, whole, strict=True))


def test_what_a_bfloat16_holds_stays(isa: str) -> None:
    """Zeros, infinities and every other value with nothing below its last place; NaN is the quiet one."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    x = (upper << 16).view(np.float32)
    for step in range(1, 20):
        m, _ = rounded(x, step=step)
        expected = np.where(np.isnan(x), 0x7FC0, upper)
        expected[(upper & 0x7F80) == 0] = 0  # subnormals, and 0 + -0, do not get as far as the rounding
        assert np.array_equal(m, expected)


def averages(gradients: F32, state_format: StateFormat, n: int, start: float = 0.0) -> np.ndarray[Any, Any]:
    """exp_avg_sq of n elements, each with the same gradients, after all of them: beta2 = 0.999."""
    p, grad = np.zeros(n, np.float32), np.zeros(n, np.float32)
    m = np.zeros(n, np.float32 if state_format is StateFormat.FP32 else np.uint16)
    v: Array = np.full(n, start, np.float32)
    if state_format is not StateFormat.FP32:
        v = reference.f32_to_bf16(v)
    batch = StepBatch()
    hyper: dict[str, Any] = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    rule = batch.add_rule(kernels.adam(**hyper, step=1))
    state: dict[str, Any] = {"state": (address(m), address(v)), "state_format": state_format}
    batch.add(n, rule, param=address(p), **state, grad=address(grad), grad_dtype=DType.FP32)
    for t, g in enumerate(gradients, 1):
        grad[:] = g
        batch.set_rule(rule, kernels.adam(**hyper, step=t))
        batch.run()
    return v if state_format is StateFormat.FP32 else reference.bf16_to_f32(v)


STEADY = np.ones(5000, np.float32)
QUIET = np.zeros(5000, np.float32)


@pytest.mark.parametrize(("gradients", "start"), [(STEADY, 0.0), (QUIET, 1.0)], ids=["rising", "falling"])
def test_plain_bfloat16_stands_still_where_stochastic_tracks(gradients: F32, start: float) -> None:
    """1 - beta2 of the way is less than half a last place of bfloat16: the average never gets there."""
    exact = start
    for g in gradients.astype(np.float64):
        exact = exact * 0.999 + g * g * 0.001
    assert averages(gradients, StateFormat.FP32, 4, start)[0] == pytest.approx(exact, rel=1e-5)

    plain = averages(gradients, StateFormat.BF16, 4, start)
    assert set(plain) == ({np.float32(0.25)} if start == 0 else {np.float32(1.0)})
    assert 0.993 < exact < 0.994 if start == 0 else exact < 0.007

    tracked = averages(gradients, StateFormat.BF16_STOCHASTIC, 4096, start).astype(np.float64)
    assert abs(tracked.mean() - exact) <= SIGMAS * tracked.std() / np.sqrt(4096)
    assert 0 < tracked.std() < 0.2 * exact
