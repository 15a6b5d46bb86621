"""Every optimizer in every format equals the written formula to the bit: on every instruction set, however cut."""

from __future__ import annotations

import ctypes
import itertools
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cpu import kernels
from optim_cpu.kernels import DType, StateFormat, StepBatch

from .cases import (
    FORMATS,
    Kind,
    address,
    every_length,
    expected,
    make,
    make_special,
    pieces,
    problem_of,
    same_bits,
)

STOCHASTIC = StateFormat.BF16_STOCHASTIC
LENGTH, EVERY_LENGTH = every_length(100)  # three pairs of the widest vectors, and a rest

LOOPS = {
    "adam": Kind("adam"),
    "lion": Kind("lion"),
    "adagrad": Kind("adagrad"),
    "sgd": Kind("sgd", (("momentum", 0.0),)),
    "sgd-momentum": Kind("sgd"),
}
"""Each is a loop of its own in each format."""

BETAS = [(0.9, 0.999), (0.3, 0.2), (0.0, 0.0), (0.9, 0.0), (0.2, 0.999), (0.5, 0.4999), (0.4999, 0.5)]

OPTIONS: list[Kind] = [
    *(
        Kind("adam").but(beta1=b1, beta2=b2, weight_decay=wd, decoupled=decoupled)
        for (b1, b2), (wd, decoupled) in itertools.product(BETAS, [(0.1, True), (0.1, False), (0.0, True)])
    ),
    *(
        Kind("lion").but(beta1=b1, beta2=b2, weight_decay=wd)
        for (b1, b2), wd in itertools.product(BETAS, [0, 0.1])
    ),
    *(
        Kind("adagrad").but(weight_decay=wd, lr_decay=d, step=9)
        for wd, d in itertools.product([0, 0.1], [0, 0.3])
    ),
    *(
        Kind("sgd").but(weight_decay=wd, step=step, momentum=momentum, dampening=dampening, nesterov=nesterov)
        for wd, step in itertools.product([0, 0.1], [1, 2])
        for momentum, dampening, nesterov in [
            (0.0, 0.0, False),
            (0.0, 0.5, False),
            (0.9, 0.0, False),
            (0.9, 0.25, False),
            (0.9, 0.0, True),
            (1.5, -0.5, False),
        ]
    ),
    *(LOOPS[name].but(maximize=True) for name in LOOPS),
    *(Kind("adam").but(step=t, decoupled=d) for t in (1, 2, 1000, 10**7) for d in (True, False)),
    *(
        Kind("adam").but(bias_correction=False, step=t, decoupled=d)
        for t in (1, 2, 1000)
        for d in (True, False)
    ),
    Kind("adam").but(bias_correction=False, lr=0.0),
    Kind("adam").but(eps=0.0),
    Kind("adam").but(lr=1e30, weight_decay=1e3),
    Kind("adam").but(lr=1e-12),
    Kind("adam").but(beta1=0.999999, beta2=0.99999999),
    Kind("adam").but(beta1=0.999999, beta2=0.99999999, step=1),
    Kind("adagrad").but(eps=0.0, step=1),
    Kind("adagrad").but(step=10**7, lr_decay=1e-3),
    *(kind.but(lr=0.0) for kind in LOOPS.values()),
    *(LOOPS[name].but(grad_scale=x) for name in LOOPS for x in (0.0, -1.0, 1e-45, 3e38, np.inf, np.nan)),
]

STEPPED_ALIKE = list({(k.state_format, k.split, k.grad_dtype): k for k in FORMATS}.values())
"""Of each format one: the output is rounded by itself."""


@pytest.mark.parametrize("loop", LOOPS)
def test_every_format_at_every_length(isa: str, loop: str) -> None:
    for layout in FORMATS:
        kind = LOOPS[loop].like(layout)
        if not kind.state_count and kind.state_format is not StateFormat.FP32:
            continue
        problem_of(kind, LENGTH, 1).check(EVERY_LENGTH, offset=1)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("layout", STEPPED_ALIKE, ids=str)
def test_every_option_in_every_format(layout: Kind) -> None:
    """Compilers make a loop of its own for each answer to what is uniform in it."""
    for kind in OPTIONS:
        problem = make(kind.like(layout), 263, 2)
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            problem.check()


@pytest.mark.parametrize("loop", LOOPS)
def test_every_combination_of_special_values(loop: str) -> None:
    """Down to the sign of a zero, which seldom tells."""
    betas = {"beta1": 0.4, "beta2": 0.3} if loop in ("adam", "lion") else {}
    kinds = [LOOPS[loop].but(grad_scale=1.0), LOOPS[loop].but(grad_scale=1.0, weight_decay=0.0, **betas)]
    for kind in kinds:
        problem = make_special(kind)
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            problem.check()


@pytest.mark.parametrize("out_dtype", [None, *DType])
@pytest.mark.parametrize("offset", [0, 1, 3, 31])
def test_a_large_output_streams_past_the_cache(isa: str, offset: int, out_dtype: DType | None) -> None:
    for n in ((1 << 18) + 77, (1 << 18) - 1):
        problem_of(Kind(grad_dtype=DType.BF16, out_dtype=out_dtype), n, 3).check(offset=offset)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    kernels.set_thread_count(threads)
    plain = Kind(grad_dtype=DType.BF16, out_dtype=DType.BF16)
    for kind in (plain, Kind("lion", state_format=STOCHASTIC, split=True)):
        problem_of(kind, 5 * (1 << 15) + 13, 4).check()
        problem_of(kind, 9 * (1 << 15), 4).check()


@pytest.mark.parametrize("loop", LOOPS)
def test_cutting_anywhere_changes_no_bit(isa: str, loop: str) -> None:
    """Tiles, blocks and vectors end elsewhere then; stochastic rounding follows the index, not the place."""
    first = (1 << 32) - 100_000
    kind = LOOPS[loop].but(state_format=STOCHASTIC, out_dtype=DType.BF16)
    problem = problem_of(kind, 200_000, 5, first)
    for cuts in (
        [0, 200_000],
        [0, 1, 17, 4096, 99_999, 100_001, 131_072, 200_000],
        [5, 99_990, 100_010, 199_999],
    ):
        problem.check(pieces(cuts))


@pytest.mark.parametrize("before_the_turn", [0, 1, 31, 32, 500, 1024, 1025])
def test_an_index_passes_2_to_the_32(isa: str, before_the_turn: int) -> None:
    for upper in (1, 7, 1 << 31):
        first = (upper << 32) - before_the_turn
        problem_of(Kind(state_format=STOCHASTIC, changed=(("seed", 99),)), 3000, 6, first).check()


@given(
    data=st.data(),
    kind=st.sampled_from(OPTIONS),
    layout=st.sampled_from(FORMATS),
    hyper=st.fixed_dictionaries(
        {
            "lr": st.floats(0, 1, width=32) | st.floats(0, 3e38),
            "weight_decay": st.just(0) | st.floats(0, 1) | st.floats(0, 3e38),
            "step": st.integers(1, 100) | st.integers(1, (1 << 63) - 1),
            "seed": st.integers(0, (1 << 64) - 1),
        }
    ),
    threads=st.sampled_from([1, 2, 3, 7]),
    name=st.sampled_from(kernels.available_instruction_sets()),
    first_index=st.integers(0, 1 << 40) | st.integers((1 << 32) - 2000, 1 << 32),
    offset=st.integers(0, 40),
)
@settings(max_examples=200, deadline=None)
def test_any_rule_in_any_format_cut_anywhere(
    data: st.DataObject, kind: Kind, layout: Kind, hyper: dict[str, Any], threads: int, name: str, first_index: int,
    offset: int,
) -> None:  # fmt: skip
    kernels.set_instruction_set(name)
    kernels.set_thread_count(threads)
    n = data.draw(st.integers(0, 300) | st.integers(0, 40_000))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    if kind.optimizer == "adam":
        hyper["beta1"], hyper["beta2"] = data.draw(st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2))
        hyper["eps"] = data.draw(st.floats(0, 1))
    kind = kind.like(layout).but(**hyper)
    problem = make(kind, n, data.draw(st.integers(0, 1000)), first_index=first_index)
    problem.check(pieces([0, *cuts, n]) if data.draw(st.booleans()) else pieces(cuts), offset=offset)


@given(
    sizes=st.lists(st.integers(0, 300) | st.integers(0, 70_000), min_size=1, max_size=12),
    kinds=st.lists(st.sampled_from(OPTIONS), min_size=1, max_size=6),
    layouts=st.lists(st.sampled_from(FORMATS), min_size=1, max_size=4),
    threads=st.sampled_from([1, 2, 3, 7]),
    name=st.sampled_from(kernels.available_instruction_sets()),
)
@settings(max_examples=50, deadline=None)
def test_a_batch_equals_its_segments_alone(
    sizes: list[int], kinds: list[Kind], layouts: list[Kind], threads: int, name: str
) -> None:
    """Segments of different rules and formats share tiles; each comes out as if stepped alone."""
    kernels.set_instruction_set(name)
    kernels.set_thread_count(threads)
    batch, problems = StepBatch(1), []
    for i, (n, kind, layout) in enumerate(
        zip(sizes, itertools.cycle(kinds), itertools.cycle(layouts), strict=False)
    ):
        kind = kind.like(layout).but(grad_scale=0.5)
        problem = make(kind, n, i, first_index=i << 20)
        arrays = problem.before.copy()
        problem.add_to(batch, batch.add_rule(kind.rule()), arrays, 0, n)
        problems.append((problem, arrays))
    assert len(batch) == len(sizes)
    batch.run(0.5)
    for problem, arrays in problems:
        assert arrays.guards_hold()
        for name_, array in arrays.by_name.items():
            assert same_bits(array, problem.after[name_]), (str(problem.kind), name_)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("n", [1001, (1 << 18) + 5])
def test_out_may_be_the_gradient(isa: str, dtype: DType, n: int) -> None:
    problem = problem_of(Kind(grad_dtype=dtype, out_dtype=dtype), n, 8)
    arrays = problem.before.copy(1)
    arrays.by_name["out"] = arrays["grad"]
    batch = StepBatch()
    problem.add_to(batch, batch.add_rule(problem.kind.rule()), arrays, 0, n)
    batch.run(problem.kind.grad_scale)
    for name in ("param", "state0", "state1", "out"):
        assert same_bits(arrays[name], problem.after[name])


def test_a_batch_keeps_its_segments_from_step_to_step() -> None:
    """Rules are replaced, gradients lie elsewhere; what was cleared is forgotten."""
    problem = make(Kind(), 777, 9, hard=False)
    arrays, batch = problem.before.copy(), StepBatch()
    rule = batch.add_rule(problem.kind.rule())
    problem.add_to(batch, rule, arrays, 0, 777)
    batch.run(problem.kind.grad_scale)
    second = make(problem.kind.but(step=4, lr=1e-2), 777, 10, hard=False)
    for name in ("param", "state0", "state1"):
        second.before.by_name[name] = arrays[name].copy()
    after = expected(second.kind, second.before, 0)
    batch.set_rule(rule, second.kind.rule())
    batch.set_grad(0, address(second.before["grad"]))
    batch.run(second.kind.grad_scale)
    for name in ("param", "state0", "state1"):
        assert same_bits(arrays[name], after[name])
    batch.clear()
    assert len(batch) == 0
    batch.run(1.0)
    assert same_bits(arrays["param"], after["param"])


def test_a_prepared_step_steps_its_segments_and_keeps_the_memory_of_the_batch() -> None:
    batch = StepBatch(1)
    problems = [make(Kind("lion", grad_scale=0.5), n, n, hard=False) for n in (70, 33, 129)]
    arrays = [problem.before.copy() for problem in problems]
    for problem, each in zip(problems, arrays, strict=True):
        problem.add_to(batch, batch.add_rule(problem.kind.rule()), each, 0, problem.numel)
    for first, count in ((-1, 1), (1, -1), (2, 2)):
        with pytest.raises(ValueError, match=r"segments \[.*\) are not among 3 of them"):
            batch.part(first, count)
    step = batch.part(1, 2, 0.5)
    kept = [weakref.ref(batch._segments), weakref.ref(batch._rules)]
    del batch
    assert all(memory() is not None for memory in kept)
    step.check(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(step.function)(step.argument))
    for each, want in zip(arrays, [problems[0].before, problems[1].after, problems[2].after], strict=True):
        assert all(same_bits(each[name], want[name]) for name in ("param", "state0"))
