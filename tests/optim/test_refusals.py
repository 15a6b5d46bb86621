"""Every wrong argument is refused by name, with its value, and leaves everything as it was."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from optim_cpu import kernels
from optim_cpu.kernels import MAX_THREADS, DType, Rule, Segment, StateFormat, StepBatch

from .cases import ADAGRAD, ADAM, HYPER, LION, SGD, Kind, make, same_bits
from .reference import BEYOND_F32

NOT_SCALARS = [-1e-3, -math.inf, math.inf, math.nan, 3.5e38, BEYOND_F32]
NOT_BETAS = [-0.1, 1.0, 1.5, math.nan, math.inf, -math.inf]

BAD: list[tuple[str, str, Any]] = [
    *((name, argument, x) for name in HYPER for argument in ("lr", "weight_decay") for x in NOT_SCALARS),
    *((name, beta, x) for name in ("adam", "lion") for beta in ("beta1", "beta2") for x in NOT_BETAS),
    *((name, "eps", x) for name in ("adam", "adagrad") for x in NOT_SCALARS),
    *(("adagrad", "lr_decay", x) for x in NOT_SCALARS),
    *(("sgd", "momentum", x) for x in NOT_SCALARS),
    *(("sgd", "dampening", x) for x in (math.inf, -math.inf, math.nan, 3.5e38, -3.5e38)),
    *((name, "step", x) for name in HYPER for x in (0, -1, -(1 << 63))),
]


@pytest.mark.parametrize(("optimizer", "argument", "value"), BAD, ids=str)
def test_a_bad_hyperparameter_is_named(optimizer: str, argument: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^{optimizer}: {argument} must be .*, got {value}$".replace("+", r"\+")
    ):
        getattr(kernels, optimizer)(**(HYPER[optimizer] | {argument: value}))


@pytest.mark.parametrize(
    "changed", [{"momentum": 0.0, "dampening": 0.0}, {"momentum": 0.9, "dampening": 0.1}], ids=str
)
def test_nesterov_needs_momentum_and_no_dampening(changed: dict[str, float]) -> None:
    with pytest.raises(
        ValueError, match=r"sgd: nesterov must come with a momentum above 0 and a dampening of 0"
    ):
        kernels.sgd(**(SGD | changed | {"nesterov": True}))


@pytest.mark.parametrize("optimizer", HYPER)
def test_what_is_just_allowed(optimizer: str) -> None:
    """The edges of each range, from inside."""
    most = math.nextafter(BEYOND_F32, 0)
    assert np.isfinite(np.float32(most))
    ranges: dict[str, list[float]] = {
        name: [0.0, most] for name in ("lr", "weight_decay", "eps", "lr_decay", "momentum")
    }
    ranges |= {
        "beta1": [0.0, math.nextafter(1, 0)],
        "beta2": [0.0, math.nextafter(1, 0)],
        "dampening": [-most, most],
    }
    hyper = HYPER[optimizer]
    for argument in ranges.keys() & hyper.keys():
        for value in ranges[argument]:
            make_rule = getattr(kernels, optimizer)
            assert isinstance(make_rule(**(hyper | {argument: value})), Rule)
    for step in (1, (1 << 63) - 1):
        assert getattr(kernels, optimizer)(**(hyper | {"step": step, "seed": (1 << 64) - 1})).state_count >= 1


def test_state_counts() -> None:
    assert [getattr(kernels, name)(**HYPER[name]).state_count for name in HYPER] == [2, 1, 1, 1]
    assert kernels.sgd(**(SGD | {"momentum": 0.0})).state_count == 0


def test_scalars_are_rounded_once() -> None:
    rule = kernels.adam(**(ADAM | {"lr": 1e-3, "weight_decay": 0.1}))
    assert rule.scalar("decay") == np.float32(1e-3 * 0.1)
    assert rule.scalar("one_minus_beta2") == np.float32(1 - 0.999)
    assert rule.scalar("scale") == 1 and kernels.lion(**LION, maximize=True).scalar("scale") == -1
    assert kernels.adagrad(**ADAGRAD).scalar("step_size") == np.float32(1e-2 / 1.2)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"step": 1 << 63}, ValueError, r"step must fit int64_t, got 9223372036854775808"),
        ({"seed": -1}, ValueError, r"seed must fit uint64_t, got -1"),
        ({"seed": 1 << 64}, ValueError, r"seed must fit uint64_t, got 18446744073709551616"),
        ({"step": 1.0}, TypeError, r"step: an integer is required, got 1.0"),
        ({"lr": "fast"}, TypeError, r"lr: must be real number, not str, got 'fast'"),
        ({"maximize": None}, TypeError, r"maximize: .*, got None"),
    ],
    ids=str,
)
def test_what_no_c_argument_holds_is_named_too(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^adam: {message}$"):
        kernels.adam(**(ADAM | changed))


GOOD: dict[str, Any] = {
    "numel": 4,
    "param": 4096,
    "state": (4096, 8192),
    "grad": 4096,
    "grad_dtype": DType.FP32,
}


def batch_of(rule: Rule) -> StepBatch:
    batch = StepBatch(1)
    batch.add_rule(rule)
    batch.add(**GOOD, rule=0)
    return batch


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("numel", {"numel": -1}),
        ("numel", {"numel": sys.maxsize}),
        ("param", {"param": 0}),
        ("param", {"param": -4096}),
        ("param", {"param": 4098}),
        ("param", {"param": 4097, "remainder": 4096}),
        ("remainder", {"remainder": 4097}),
        ("remainder", {"remainder": -2}),
        ("state0", {"state": ()}),
        ("state0", {"state": (4098, 8192)}),
        ("state0", {"state": (4097, 8192), "state_format": StateFormat.BF16}),
        ("state1", {"state": (4096,)}),
        ("state1", {"state": (4096, 8194)}),
        ("state1", {"state": (4096, 8193), "state_format": StateFormat.BF16_STOCHASTIC}),
        ("state_format", {"state_format": 3}),
        ("state_format", {"state_format": -1}),
        ("grad", {"grad": 0}),
        ("grad", {"grad": 4098}),
        ("grad", {"grad": 4097, "grad_dtype": DType.FP16}),
        ("grad_dtype", {"grad_dtype": 3}),
        ("grad_dtype", {"grad_dtype": -1}),
        ("out", {"out": 4097}),
        ("out", {"out": -2}),
        ("out", {"out": 4098, "out_dtype": DType.FP32}),
        ("out_dtype", {"out_dtype": 3}),
        ("out_dtype", {"out_dtype": -1}),
        ("out", {"out": 4096, "remainder": 8192}),
    ],
    ids=str,
)
def test_a_bad_argument_is_named_and_leaves_the_batch_alone(argument: str, changed: dict[str, Any]) -> None:
    batch = batch_of(kernels.adam(**ADAM))
    value = changed[argument] if argument in changed else (*changed["state"], 0)[int(argument[-1])]
    with pytest.raises(ValueError, match=rf"^StepBatch.add: {argument} must be .*, got ") as caught:
        batch.add(**(GOOD | changed), rule=0)
    if argument in changed:
        assert str(caught.value).endswith(f"got {value!r}")
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"first_index": -1}, ValueError, r"first_index must fit uint64_t, got -1"),
        ({"numel": 1 << 63}, ValueError, r"numel must fit int64_t, got"),
        ({"out": 1 << 70}, ValueError, r"out must fit intptr_t, got"),
        ({"grad_dtype": "fp32"}, TypeError, r"grad_dtype: an integer is required, got 'fp32'"),
        ({"state": (4096, 1.5)}, TypeError, r"state1: an integer is required, got 1.5"),
    ],
    ids=str,
)
def test_nor_is_the_batch_changed_by_what_no_c_argument_holds(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    batch = batch_of(kernels.adam(**ADAM))
    with pytest.raises(error, match=rf"^StepBatch.add: {message}"):
        batch.add(**(GOOD | changed), rule=0)
    assert len(batch) == 1


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"grad": 4098}, ValueError, r"grad must be .*, got 4098"),
        ({"numel": 1 << 63}, ValueError, r"numel must fit int64_t, got"),
        ({"out_dtype": "bf16"}, TypeError, r"out_dtype: an integer is required, got 'bf16'"),
        ({"rule": 1}, ValueError, r"there is no rule 1"),
    ],
    ids=str,
)
def test_one_bad_segment_keeps_all_that_are_added_with_it_out(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    batch = batch_of(kernels.adam(**ADAM))
    good = Segment(0, 4, 4096, 0, 4096, 8192, StateFormat.FP32, 4096, DType.FP32, 0, DType.BF16, 0)
    with pytest.raises(error, match=rf"^StepBatch.add: {message}"):
        batch.add_all([good, good, good._replace(**changed), good])
    assert len(batch) == 1
    batch.add_all([good] * 5)
    assert len(batch) == 6


def test_addresses_that_are_just_aligned_are_taken() -> None:
    batch = StepBatch(1)
    batch.add_rule(kernels.adam(**ADAM))
    halves: dict[str, Any] = {"state_format": StateFormat.BF16, "grad_dtype": DType.BF16}
    assert batch.add(4, 0, param=4100, state=(4102, 4106), grad=4098, out=4098, **halves) == 0
    assert batch.add(4, 0, param=4098, remainder=4102, state=(4102, 4106), grad=4098, **halves) == 1
    # A segment without elements needs no addresses.
    assert batch.add(0, 0, param=0, grad=0, grad_dtype=DType.FP32) == 2
    assert len(batch) == 3


def test_state_that_an_optimizer_does_not_have_is_ignored() -> None:
    batch = StepBatch()
    plain = batch.add_rule(kernels.sgd(**(SGD | {"momentum": 0.0})))
    lion = batch.add_rule(kernels.lion(**LION))
    batch.add(4, plain, param=4096, grad=4096, grad_dtype=DType.FP32, state=(1, 3))
    batch.add(4, lion, param=4096, grad=4096, grad_dtype=DType.FP32, state=(4096, 3))
    with pytest.raises(ValueError, match=r"state0 must be"):
        batch.add(4, lion, param=4096, grad=4096, grad_dtype=DType.FP32)


@pytest.mark.parametrize("number", [-1, 1, 7])
def test_rules_that_are_not_there(number: int) -> None:
    batch = batch_of(kernels.adam(**ADAM))
    with pytest.raises(ValueError, match=rf"StepBatch.add: there is no rule {number}, only 1 of them"):
        batch.add(**GOOD, rule=number)
    with pytest.raises(ValueError, match=rf"StepBatch.set_rule: there is no rule {number}, only 1 of them"):
        batch.set_rule(number, kernels.adam(**ADAM))
    batch.clear()
    with pytest.raises(ValueError, match=r"there is no rule 0, only 0"):
        batch.add(**GOOD, rule=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (kernels.adam(**ADAM), kernels.lion(**LION)),
        (kernels.lion(**LION), kernels.adagrad(**ADAGRAD)),
        (kernels.sgd(**SGD), kernels.sgd(**(SGD | {"momentum": 0.0}))),
        (kernels.sgd(**(SGD | {"momentum": 0.0})), kernels.sgd(**SGD)),
    ],
)
def test_a_rule_of_another_optimizer_is_refused(old: Rule, new: Rule) -> None:
    """Its segments have other state."""
    batch = StepBatch()
    batch.add_rule(old)
    with pytest.raises(
        ValueError, match=r"StepBatch.set_rule: rule 0 is of another optimizer; clear the batch"
    ):
        batch.set_rule(0, new)
    batch.set_rule(0, old)


def test_a_gradient_that_is_not_there() -> None:
    batch = batch_of(kernels.adam(**ADAM))
    for segment in (1, 17):
        with pytest.raises(ValueError, match=rf"StepBatch.set_grad: segment must be .*, got {segment}"):
            batch.set_grad(segment, 4096)
    for grad in (0, -4096, 4098):
        with pytest.raises(ValueError, match=rf"StepBatch.set_grad: grad must be .*, got {grad}"):
            batch.set_grad(0, grad)


def test_after_a_refusal_the_batch_steps_as_before() -> None:
    problem = make(Kind(), 300, 1)
    arrays, batch = problem.before.copy(), StepBatch(1)
    rule = batch.add_rule(problem.kind.rule())
    problem.add_to(batch, rule, arrays, 0, 100)
    for _ in range(3):
        with pytest.raises(ValueError, match="param"):
            batch.add(**(GOOD | {"param": 1}), rule=rule)
        with pytest.raises(ValueError, match="another optimizer"):
            batch.set_rule(rule, kernels.lion(**LION))
        with pytest.raises(ValueError, match="grad"):
            batch.set_grad(0, 3)
    problem.add_to(batch, rule, arrays, 100, 300)
    batch.run(problem.kind.grad_scale)
    for name, array in arrays.by_name.items():
        assert same_bits(array, problem.after[name])


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        *(("split", argument, value) for argument, value in [("numel", -1), ("param", 0), ("param", 4097)]),
        *(
            ("split", argument, value)
            for argument, value in [("master", 0), ("master", 4098), ("remainder", 4097)]
        ),
        *(("join", argument, value) for argument, value in [("numel", -1), ("param", 0), ("param", 4097)]),
        *(
            ("join", argument, value)
            for argument, value in [("master", 4098), ("remainder", 4097), ("remainder", 0)]
        ),
    ],
)
def test_split_and_join_name_what_is_wrong(call: str, argument: str, value: int) -> None:
    good = {"param": 4096, "remainder": 4096, "master": 4096, "numel": 4}
    with pytest.raises(ValueError, match=rf"^{call}: {argument} must be .*, got {value}$"):
        getattr(kernels, call)(**(good | {argument: value}))


def test_instruction_sets_and_threads() -> None:
    before = kernels.instruction_set(), kernels.thread_count()
    for name in ("", "sse9", "AVX2"):
        with pytest.raises(ValueError, match=rf"name is '{name}': this CPU offers .*portable"):
            kernels.set_instruction_set(name)
    for n in (0, -1, MAX_THREADS + 1):
        with pytest.raises(ValueError, match=rf"n must be 1 to {MAX_THREADS}, got {n}"):
            kernels.set_thread_count(n)
    assert (kernels.instruction_set(), kernels.thread_count()) == before
