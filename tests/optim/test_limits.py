"""Where numbers end: infinities, NaN, overflow, subnormals, and hyperparameters at their edges, one policy each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optim_cpu import kernels
from optim_cpu.kernels import DType, StateFormat, StepBatch

from .cases import ADAGRAD, ADAM, LION, SGD, Kind, address, make, same_bits
from .reference import F32

INF, NAN = np.inf, np.nan
QUIET_NAN = 0x7FC00000
LEAST = 2.0**-126  # the least normal number

LOOPS = [
    Kind("adam"),
    Kind("adam").but(decoupled=False),
    Kind("lion"),
    Kind("adagrad"),
    Kind("sgd").but(momentum=0.0),
    Kind("sgd"),
    Kind("sgd").but(nesterov=True, dampening=0.0),
]


class Run:
    """Some elements and their state, stepped again and again with gradients as given."""

    def __init__(self, optimizer: str, p: list[float], hyper: dict[str, Any], *, state: float = 0.0) -> None:
        self.optimizer, self.hyper, self.step_number = optimizer, hyper, 0
        self.p = np.array(p, np.float32)
        self.state = [np.full(len(p), state, np.float32) for _ in range(2)]

    def step(self, grad: list[float] | F32, grad_scale: float = 1.0, **changed: Any) -> F32:
        g = np.array(grad, np.float32)
        self.step_number += 1
        rule = getattr(kernels, self.optimizer)(**(self.hyper | {"step": self.step_number} | changed))
        batch = StepBatch()
        number, state = batch.add_rule(rule), tuple(map(address, self.state))
        batch.add(len(g), number, param=address(self.p), state=state, grad=address(g), grad_dtype=DType.FP32)
        batch.run(grad_scale)
        return self.p.copy()


def bits(x: F32) -> list[int]:
    return [int(i) for i in x.view(np.uint32)]


PLAIN_ADAM = ADAM | {"weight_decay": 0.0}


# NaN and infinity


@pytest.mark.parametrize("kind", LOOPS, ids=str)
@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("split", [False, True])
def test_a_nan_gradient_makes_its_element_nan_at_once_and_no_other(
    isa: str, kind: Kind, state_format: StateFormat, split: bool
) -> None:
    """Parameter, state and output hold the one quiet NaN, whatever sign and payload came in."""
    kind = kind.but(state_format=state_format, split=split, out_dtype=None if split else DType.FP16)
    problem = make(kind, 300, hard=False)
    at = [0, 31, 32, 77, 299]
    problem.before["grad"].view(np.uint32)[at] = [0x7FC00000, 0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0x7FABCDEF]
    arrays, batch = problem.before.copy(), StepBatch()
    problem.add_to(batch, batch.add_rule(kind.rule()), arrays, 0, 300)
    batch.run(kind.grad_scale)
    other = np.delete(np.arange(300), at)
    for name, array in arrays.by_name.items():
        if name == "grad":
            continue
        if name == "remainder":
            assert (array[at] == 0).all()
        elif array.dtype == np.float16:
            assert (array[at].view(np.uint16) == 0x7E00).all()
        elif array.dtype == np.uint16:
            assert (array[at] == 0x7FC0).all()
        else:
            assert (array[at].view(np.uint32) == QUIET_NAN).all()
        assert same_bits(array[other], problem.after[name][other])
        assert not np.isnan(problem.after[name][other]).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_gradient_ends_adam_at_once(sign: int) -> None:
    run = Run("adam", [1.0, 1.0], PLAIN_ADAM)
    assert bits(run.step([sign * INF, 1.0]))[0] == QUIET_NAN
    assert run.state[0][0] == sign * INF
    assert run.state[1][0] == INF
    assert np.isfinite([run.p[1], run.state[0][1], run.state[1][1]]).all()


def test_a_square_that_overflows_ends_adam_in_the_next_step() -> None:
    """At first the denominator is infinite and the step 0; then infinity minus infinity."""
    run = Run("adam", [1.0], PLAIN_ADAM)
    assert run.step([1e20])[0] == 1
    assert run.state[1][0] == INF and np.isfinite(run.state[0][0])
    assert bits(run.step([1.0])) == [QUIET_NAN]
    assert bits(run.state[1]) == [QUIET_NAN]


def test_with_beta2_below_a_half_an_overflow_stands_still() -> None:
    """Nothing is subtracted from infinity then."""
    run = Run("adam", [1.0], PLAIN_ADAM | {"beta2": 0.4})
    assert [run.step([g])[0] for g in (1e20, 1.0, 1.0)] == [1, 1, 1]
    assert run.state[1][0] == INF


def test_an_infinite_gradient_ends_lion_in_the_next_step() -> None:
    run = Run("lion", [1.0], LION | {"weight_decay": 0.0})
    assert run.step([-INF])[0] == np.float32(1) + np.float32(LION["lr"])
    assert run.state[0][0] == -INF
    assert bits(run.step([1.0])) == [QUIET_NAN]
    assert bits(run.state[0]) == [QUIET_NAN]


def test_lion_tells_a_nan_that_its_sign_does_not_see() -> None:
    """With beta2 = 0 the moment is infinity times 0, while the sign of this step is that of infinity."""
    run = Run("lion", [1.0], LION | {"weight_decay": 0.0, "beta1": 0.4, "beta2": 0.0}, state=INF)
    assert run.step([1.0])[0] == np.float32(1) - np.float32(LION["lr"])
    assert bits(run.state[0]) == [QUIET_NAN]


def test_adagrad_becomes_nan_or_stands_still() -> None:
    """Infinite: infinity over infinity. Only its square overflowed: the sum is infinite, and no step has a length."""
    run = Run("adagrad", [1.0, 1.0], ADAGRAD | {"weight_decay": 0.0})
    p = run.step([INF, 1e20])
    assert bits(p)[0] == QUIET_NAN and p[1] == 1
    assert run.state[0][1] == INF
    assert run.step([1.0, 1.0])[1] == 1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_becomes_infinite_and_nan_with_decay(momentum: float) -> None:
    hyper = SGD | {"momentum": momentum, "dampening": 0.0, "weight_decay": 0.0}
    run = Run("sgd", [1.0], hyper)
    assert run.step([INF])[0] == -INF
    assert run.step([1.0])[0] == -INF
    assert bits(run.step([-INF])) == [QUIET_NAN]
    large = Run("sgd", [1.0], hyper)
    assert large.step([1e20])[0] == np.float32(1) - np.float32(0.1) * np.float32(1e20)


def test_nothing_is_clamped(isa: str) -> None:
    run = Run("sgd", [3e38, -3e38], SGD | {"momentum": 0.0, "weight_decay": 0.0, "lr": 1.0})
    assert run.step([-3e38, 3e38]).tolist() == [INF, -INF]
    hot = Run("adam", [-3.3e38], PLAIN_ADAM | {"lr": 8e36})
    assert -INF < hot.step([1.0])[0] < -3.37e38
    assert hot.step([1.0])[0] == -INF


@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_an_infinite_parameter_stays_without_decay(kind: Kind) -> None:
    run = Run(kind.optimizer, [INF, -INF], kind.hyper | {"weight_decay": 0.0})
    for g in (1.0, -2.0, 0.5):
        assert run.step([g, g]).tolist() == [INF, -INF]


def test_an_infinite_parameter_with_decay_is_nan_at_the_latest_in_the_next_step() -> None:
    for kind in LOOPS:
        run = Run(kind.optimizer, [INF, -INF], kind.hyper | {"weight_decay": 0.1})
        run.step([1.0, 1.0])
        assert np.isnan(run.step([1.0, 1.0])).all(), str(kind)


def test_sum_of_squares_tells_a_step_that_should_be_skipped() -> None:
    for bad in (INF, -INF, NAN):
        g = np.ones(1000, np.float32)
        g[777] = bad
        assert not kernels.sum_of_squares(address(g), DType.FP32, 1000).is_finite
    g = np.full(1000, 3e38, np.float32)  # each square is beyond float32
    assert kernels.sum_of_squares(address(g), DType.FP32, 1000).is_finite


def test_a_parameter_beyond_its_output_is_infinite_there(isa: str) -> None:
    """Halves reach 65504; bfloat16 rounds what is nearer to 2^128 than to its largest number."""
    p = np.array([65503, 65519.99, 65520, -65520, 3.3895314e38, 3.39e38, 3.4e38, -3.4e38], np.float32)
    g, out = np.zeros(len(p), np.float32), np.zeros(len(p), np.uint16)
    for dtype, value in (
        (DType.FP16, [0x7BFF, 0x7BFF, 0x7C00, 0xFC00, 0x7C00, 0x7C00, 0x7C00, 0xFC00]),
        (DType.BF16, [0x4780, 0x4780, 0x4780, 0xC780, 0x7F7F, 0x7F7F, 0x7F80, 0xFF80]),
    ):
        batch = StepBatch()
        rule = batch.add_rule(kernels.sgd(**(SGD | {"momentum": 0.0, "weight_decay": 0.0})))
        output: dict[str, Any] = {"out": address(out), "out_dtype": dtype}
        batch.add(len(p), rule, param=address(p), grad=address(g), grad_dtype=DType.FP32, **output)
        batch.run()
        assert out.tolist() == value


# Hyperparameters at their edges


@pytest.mark.parametrize("kind", LOOPS, ids=str)
def test_lr_0_moves_no_parameter_but_all_state(kind: Kind) -> None:
    run = Run(kind.optimizer, [1.0, -2.0, 0.0], kind.hyper | {"lr": 0.0})
    assert run.step([1.0, 0.0, -1e19]).tolist() == [1.0, -2.0, 0.0]
    assert run.step([1.0, 0.0, -1e19]).tolist() == [1.0, -2.0, 0.0]
    if kind.state_count:
        assert run.state[0][0] != 0


def test_lr_0_with_a_moment_of_0_is_no_nan() -> None:
    assert Run("adam", [1.0], ADAM | {"lr": 0.0, "eps": 0.0}).step([0.0])[0] == 1


@pytest.mark.parametrize("lr", [1e-300, 1e-45, 1e-39])
def test_an_lr_too_small_for_float32_is_no_step(lr: float) -> None:
    assert Run("adam", [1.0, 1e-30], PLAIN_ADAM | {"lr": lr}).step([1.0, 0.0]).tolist() == [
        1,
        np.float32(1e-30),
    ]


def test_lr_changes_nothing_but_the_length_of_the_step() -> None:
    """Adam's step size is folded into the denominator: a length over 20 orders of magnitude is still that length."""
    for lr in (1e-15, 1e-9, 1e-3, 1.0, 1e5):
        run = Run("adam", [0.0], PLAIN_ADAM | {"lr": lr})
        assert run.step([0.5])[0] == pytest.approx(-lr * 0.5 / (0.5 + 1e-8), rel=3e-7)


def test_the_first_step_is_corrected() -> None:
    """Of length lr, whatever the gradient, as long as eps is small beside it."""
    g = [1.0, -1e-3, 1e15, -1e-5]
    for beta1, beta2 in ((0.9, 0.999), (0.99999, 0.9999999), (0.1, 0.2), (0.0, 0.0)):
        run = Run("adam", [0.0] * 4, PLAIN_ADAM | {"beta1": beta1, "beta2": beta2, "eps": 1e-12, "lr": 0.5})
        np.testing.assert_allclose(run.step(g), -0.5 * np.sign(g), rtol=1e-6)


@pytest.mark.parametrize("step", [10**7, 1 << 40, (1 << 63) - 1])
def test_after_many_steps_nothing_is_left_to_correct(step: int) -> None:
    run = Run("adam", [1.0], PLAIN_ADAM, state=0.25)
    m, v = 0.25 * 0.9 + 0.3 * 0.1, 0.25 * 0.999 + 0.09 * 0.001
    assert run.step([0.3], step=step)[0] == pytest.approx(1 - 1e-3 * m / np.sqrt(v), abs=1e-7)
    still = Run("adagrad", [1.0], ADAGRAD | {"weight_decay": 0.0})
    assert still.step([1.0], step=step)[0] == pytest.approx(1 - 1e-2 / (1 + (step - 1) * 0.1), abs=6e-8)


def test_beta2_0_is_the_sign_of_the_moment() -> None:
    run = Run("adam", [0.0, 0.0], PLAIN_ADAM | {"beta1": 0.0, "beta2": 0.0, "lr": 0.25})
    assert run.step([3.0, -1e-3]).tolist() == [-0.25, np.float32(0.25 / (1 + 1e-5))]
    assert run.state[1].tolist() == [9.0, np.float32(1e-3) * np.float32(1e-3)]
    run.step([-2.0, 0.0])
    assert run.p[0] == 0 and run.state[1].tolist() == [4.0, 0.0]


def test_eps_0_needs_a_gradient() -> None:
    """0 over 0 is NaN, here as in torch."""
    run = Run("adam", [1.0, 1.0], PLAIN_ADAM | {"eps": 0.0})
    result = run.step([0.0, 1e-17])  # of one below 3.4e-18, the second moment is subnormal, and so 0
    assert bits(result)[0] == QUIET_NAN and result[1] == pytest.approx(0.999)
    q = torch.nn.Parameter(torch.ones(1))
    q.grad = torch.zeros(1)
    torch.optim.Adam([q], eps=0.0).step()
    assert q.isnan().all()


def test_no_gradient_and_no_decay_moves_nothing() -> None:
    for kind in LOOPS:
        run = Run(kind.optimizer, [1.0, -3.0], kind.hyper | {"weight_decay": 0.0})
        for _ in range(3):
            assert run.step([0.0, -0.0]).tolist() == [1.0, -3.0], str(kind)


def test_decay_alone_shrinks() -> None:
    run = Run("adam", [1.0, -1.0, LEAST], ADAM | {"lr": 0.5, "weight_decay": 0.5})
    for want in (0.75, 0.5625, 0.421875):  # a quarter of LEAST is 0, as a step has no subnormals
        assert run.step([0.0, 0.0, 0.0]).tolist() == [want, -want, LEAST]


# Subnormals: a step has none


PLAIN_SGD = SGD | {"momentum": 0.0, "weight_decay": 0.0, "lr": 1.0}
BELOW = float(np.nextafter(np.float32(LEAST), np.float32(0)))


def test_a_subnormal_operand_is_the_zero_of_its_sign(isa: str) -> None:
    """Of a parameter, gradient or state in memory, and of a scalar."""
    run = Run("sgd", [BELOW, -BELOW, 0.0, 1.0, LEAST], PLAIN_SGD)
    assert bits(run.step([0.0, 0.0, BELOW, BELOW, 0.0])) == bits(np.array([0, -0.0, 0, 1, LEAST], np.float32))
    assert run.step([2.0**100], grad_scale=BELOW)[0] == 0
    assert run.step([2.0**100], lr=BELOW)[0] == 0
    momentum = Run("sgd", [0.0], PLAIN_SGD | {"momentum": 0.5, "dampening": 0.0}, state=BELOW)
    momentum.step_number = 1
    assert momentum.step([0.0]).tolist() == [0] and momentum.state[0].tolist() == [0]
    lion = Run("lion", [0.0, 0.0], LION | {"weight_decay": 0.0, "lr": 0.5, "beta1": 0.5}, state=BELOW)
    assert lion.step([-BELOW, 4 * LEAST]).tolist() == [0, -0.5]
    # bfloat16 gradients: two subnormals, two of the least normal number
    widened = np.array([0x7F, 0x807F, 0x80, 0x8080], np.uint16)
    p = np.zeros(len(widened), np.float32)
    batch = StepBatch()
    rule = batch.add_rule(kernels.sgd(**(PLAIN_SGD | {"step": 1})))
    batch.add(len(p), rule, param=address(p), grad=address(widened), grad_dtype=DType.BF16)
    batch.run()
    assert p.tolist() == [0, 0, -LEAST, LEAST]


# A product with LEAST: the factor 1 - e is 2^-126 - e 2^-126. With 24 bits 1 - 2^-24 is exact, and with the 23 of the
# greatest subnormal it rounds to 1. (1 + 2^-23) (1 - k 2^-24) is 1 + (2 - k) 2^-24 - k 2^-47.
ROUNDED = [
    (LEAST, 1.0, LEAST),
    (LEAST, 1 - 2.0**-24, 0.0),
    (LEAST * (1 + 2.0**-23), 1 - 2.0**-23, LEAST),  # 1 - 2^-46: only its 24 bits are 1
    (LEAST * (1 + 2.0**-23), 1 - 3 * 2.0**-24, 0.0),  # 1 - 2^-24 - 3 * 2^-47
    (LEAST * (1 + 2.0**-23), 1 - 2.0**-24, LEAST),  # 1 + 2^-24 - 2^-47
    (2 * LEAST, 0.5 - 2.0**-25, 0.0),
]


@pytest.mark.parametrize(("x", "factor", "product"), ROUNDED)
def test_a_product_is_subnormal_by_its_value_after_rounding_to_24_bits(
    isa: str, x: float, factor: float, product: float
) -> None:
    """As x86 sees it; Arm would look before rounding, and without either, subnormals have fewer bits."""
    for sign in (1.0, -1.0):
        run = Run("sgd", [0.0] * 40, PLAIN_SGD | {"lr": factor})
        assert set(run.step([sign * x] * 40).tolist()) == {-sign * product}
        run = Run("sgd", [0.0] * 40, PLAIN_SGD)
        assert set(run.step([sign * x] * 40, grad_scale=factor).tolist()) == {-sign * product}


def test_a_sum_below_the_least_normal_number_is_zero(isa: str) -> None:
    run = Run("sgd", [1.5 * LEAST, -1.5 * LEAST, 2 * LEAST], PLAIN_SGD)
    assert bits(run.step([LEAST, -LEAST, LEAST])) == bits(np.array([0, -0.0, LEAST], np.float32))


def test_zero_gradients_never_make_state_subnormal(isa: str) -> None:
    """The average stops where its step would be subnormal: before, it became subnormal in step 721 and stayed it."""
    for kind in LOOPS:
        run = Run(kind.optimizer, [1.0], kind.hyper | {"weight_decay": 0.0})
        for t in range(1500):
            run.step([1.0 if t == 0 else 0.0])
            for x in run.state:
                assert x[0] == 0 or abs(x[0]) >= LEAST, f"{kind}, step {t}"
        if kind.optimizer == "adam":
            step = LEAST / (1 - ADAM["beta1"])
            assert 0.9 * step < run.state[0][0] < step
