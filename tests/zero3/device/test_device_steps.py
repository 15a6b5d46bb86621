"""The optimizers' steps on a device give the bits of the C kernels: as torch operations, and by kernels.cu."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_cpu import kernels
from optim_cpu.dtypes import DTYPES
from optim_cpu.formats import round_parameters
from optim_cpu.kernels import DType, Rule, StateFormat
from zero3.device import kernels as device_kernels
from zero3.device.kernels import Segment, cuda_library, fused, torch_operations

from .kernels_by_gcc import STEPS, CompiledByGcc, same_bits

LAUNCHED = STEPS


def adam(step: int, *, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    own |= {"beta1": beta, "beta2": 0.95, "eps": 1e-8}
    return kernels.adam(lr=lr, weight_decay=weight_decay, step=step, **own)


def lion(step: int, *, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    return kernels.lion(lr=lr, beta1=beta, beta2=0.4, weight_decay=weight_decay, step=step, **own)


def adagrad(step: int, *, lr: float = 1e-2, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    return kernels.adagrad(lr=lr, lr_decay=beta, eps=1e-10, weight_decay=weight_decay, step=step, **own)


def sgd(step: int, *, lr: float = 1e-2, beta: float = 0.9, weight_decay: float = 0.1, **own: Any) -> Rule:
    options = {"dampening": 0.3, "nesterov": False} | own
    return kernels.sgd(lr=lr, momentum=beta, weight_decay=weight_decay, step=step, **options)


RULES: dict[str, Callable[..., Rule]] = {
    "adamw": adam,
    "adam": partial(adam, decoupled=False),
    "adam, uncorrected": partial(adam, bias_correction=False),
    "lion": lion,
    "adagrad": adagrad,
    "sgd": sgd,
    "sgd, nesterov": partial(sgd, dampening=0.0, nesterov=True),
    "sgd without momentum": lambda step, beta=0.0, **own: sgd(step, beta=0.0, **own),
}


@pytest.fixture(params=RULES)
def rule_at(request: pytest.FixtureRequest) -> Callable[..., Rule]:
    return RULES[request.param]


@pytest.fixture
def exact_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's sqrt on a CPU is not correctly rounded; that of a GPU is, and so is one by way of float64."""
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: sqrt(t.double()).float())


def step_in_c(
    rule: Rule,
    param: Tensor,
    state: list[Tensor],
    grad: Tensor,
    *,
    out: Tensor | None = None,
    grad_scale: float = 1.0,
    remainder: Tensor | None = None,
    state_format: StateFormat = StateFormat.FP32,
    first_index: int = 0,
) -> None:
    batch = kernels.StepBatch()
    batch.add(
        param.numel(),
        batch.add_rule(rule),
        param=param.data_ptr(),
        remainder=0 if remainder is None else remainder.data_ptr(),
        state=tuple(tensor.data_ptr() for tensor in state),
        state_format=state_format,
        grad=grad.data_ptr(),
        grad_dtype=DTYPES[grad.dtype],
        out=0 if out is None else out.data_ptr(),
        out_dtype=DType.BF16 if out is None else DTYPES[out.dtype],
        first_index=first_index,
    )
    batch.run(grad_scale)


def step_on_device(grad_scale: float, *segment: Any, **more: Any) -> None:
    device_kernels.step_segments([Segment(*segment, **more)], grad_scale)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_rule(
    rule_at: Callable[..., Rule], half: torch.dtype, maximize: bool, exact_sqrt: None, way: str
) -> None:
    """Several steps, gradients and parameters of 16 bits; state that the rule does not have stays as it is."""
    generator = torch.Generator().manual_seed(2)
    ours = [torch.randn(5000, generator=generator), torch.zeros(5000), torch.zeros(5000)]
    theirs = [tensor.clone() for tensor in ours]
    out, expected = torch.empty(5000, dtype=half), torch.empty(5000, dtype=half)
    start = ours[0].clone()
    for step in range(1, 4):
        grad = torch.randn(5000, generator=generator).to(half)
        rule = rule_at(step, maximize=maximize)
        step_on_device(0.37, rule, ours[0], ours[1:], grad, out)
        step_in_c(rule, theirs[0], theirs[1:], grad, out=expected, grad_scale=0.37)
    assert all(map(same_bits, ours, theirs))
    assert same_bits(out, expected)
    assert not torch.equal(ours[0], start)
    assert [bool(tensor.any()) for tensor in ours[1:]] == [i < rule.state_count for i in range(2)]


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-50, 0.1])
@pytest.mark.parametrize("lr", [0.0, 1e-3, 1e20])
def test_every_rule_at_the_edges(
    rule_at: Callable[..., Rule],
    lr: float,
    weight_decay: float,
    beta: float,
    request: pytest.FixtureRequest,
    exact_sqrt: None,
    way: str,
) -> None:
    """Both forms of an average, decay that float32 does not hold, a warmup's lr of 0; zeros, subnormals, infinities,
    and NaN, of which the kernels store only one."""
    if beta == 0 and request.node.callspec.params["rule_at"] == "sgd, nesterov":
        beta = 0.1  # it needs some
    special = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 3e38, -1e19, math.inf, -math.inf, 1.0, -2.5, math.nan])
    special = torch.cat([special, torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])
    param, grad = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    ours = [param.clone(), torch.full_like(param, -0.0), torch.zeros_like(param)]
    theirs = [tensor.clone() for tensor in ours]
    for step in range(1, 4):
        rule = rule_at(step, lr=lr, beta=beta, weight_decay=weight_decay)
        step_on_device(1.0, rule, ours[0], ours[1:], grad)
        step_in_c(rule, theirs[0], theirs[1:], grad)
    for name, mine, other in zip(("param", "state 0", "state 1"), ours, theirs, strict=True):
        assert same_bits(mine, other), name
    assert ours[0].isnan().any() and not ours[0].isnan().all()


def test_results_near_the_least_normal_number(exact_sqrt: None, way: str) -> None:
    """Where they become zero depends on how many bits they are rounded to: by products, and by quotients."""
    generator = torch.Generator().manual_seed(7)
    about = 1 + torch.rand(4000, generator=generator)
    about[::4] = 2.0  # only quotients by a power of 2 are so near to the middle of two subnormals
    for factor in (1.0, 1 - 2.0**-24, 1 - 3 * 2.0**-24):
        for rule, size in (
            (kernels.sgd(lr=factor, momentum=0, dampening=0, nesterov=False, weight_decay=0, step=1), 1.0),
            (kernels.adagrad(lr=factor, lr_decay=0, eps=0, weight_decay=0, step=1), about),
        ):
            places = torch.randint(-4, 4, (4000,), generator=generator, dtype=torch.int32)
            grad = ((torch.ones(4000) * size * 2.0**-125 / 2).view(torch.int32) + places).view(torch.float32)
            ours = [torch.zeros(4000), about.square(), torch.zeros(4000)]
            theirs = [tensor.clone() for tensor in ours]
            step_on_device(1.0, rule, ours[0], ours[1:], grad)
            step_in_c(rule, theirs[0], theirs[1:], grad)
            assert all(map(same_bits, ours, theirs))
            assert 500 < int((ours[0] == 0).sum()) < 4000


@pytest.mark.parametrize(("lr", "grad_scale"), [(1e-40, 1.0), (1.0, 1e-40)])
def test_a_subnormal_scalar_is_zero(lr: float, grad_scale: float, way: str) -> None:
    rule = kernels.sgd(lr=lr, momentum=0, dampening=0, nesterov=False, weight_decay=0, step=1)
    ours, theirs, grad = torch.ones(40), torch.ones(40), torch.full((40,), 1e38)
    step_on_device(grad_scale, rule, ours, [], grad)
    step_in_c(rule, theirs, [], grad, grad_scale=grad_scale)
    assert ours.tolist() == theirs.tolist() == [1.0] * 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_parameters(dtype: torch.dtype) -> None:
    bits = torch.randint(
        -(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(3), dtype=torch.int64
    )
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000  # just between two bf16
    master = bits.to(torch.int32).view(torch.float32)
    first, other = torch.empty(100_000, dtype=dtype), torch.empty(100_000, dtype=dtype)
    device_kernels.round_parameters(master, first)
    round_parameters(master, other)
    assert torch.equal(first.isnan(), other.isnan())
    assert torch.equal(first.nan_to_num(nan=0), other.nan_to_num(nan=0))
    canonical = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}[dtype]
    stored = first.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert set(stored[first.isnan()].tolist()) == {canonical}


FORMATS = [
    pytest.param(state_format, split, id=f"{'split, ' if split else ''}{state_format.name}")
    for split in (False, True)
    for state_format in StateFormat
    if split or state_format is not StateFormat.FP32
]
SPECIAL = torch.tensor(
    # zeros, subnormals, ties of a bf16 (up, to infinity, below the smallest, of a subnormal), infinities, NaN
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00018000, 0x00008000, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF,
     0x3F808001, 0x7F7F8000, 0x7F7F7FFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
     0x7FFFFFFF, 0x3F800000, 0x5F000000, 0xA0000000]
).to(torch.int32).view(torch.float32)  # fmt: skip


def by_format(
    param: Tensor, state: list[Tensor], state_format: StateFormat, *, split: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """A float32 parameter and its state as the formats hold them."""
    states = [tensor if state_format is StateFormat.FP32 else tensor.bfloat16() for tensor in state]
    if not split:
        return {"param": param.clone()}, states
    halves = {"param": torch.empty_like(param, dtype=torch.bfloat16), "remainder": param.to(torch.int16)}
    kernels.split(halves["param"].data_ptr(), halves["remainder"].data_ptr(), param.data_ptr(), param.numel())
    return halves, states


def assert_same_steps(
    rule_at: Callable[..., Rule],
    param: Tensor,
    state: list[Tensor],
    grads: list[Tensor],
    state_format: StateFormat,
    *,
    split: bool,
    **options: Any,
) -> list[Tensor]:
    """Step by both, and compare every array after each step; returns ours."""
    (ours, ours_kept), (theirs, theirs_kept) = (
        by_format(param, [tensor.clone() for tensor in state], state_format, split=split) for _ in range(2)
    )
    outs = [torch.empty_like(param, dtype=torch.bfloat16) for _ in range(0 if split else 2)]
    out, expected = outs or (None, None)
    for number, grad in enumerate(grads, 1):
        rule = rule_at(number, seed=(1 << 64) - 3)
        how = {"state_format": state_format, "grad_scale": 0.37} | options
        step_on_device(rule=rule, state=ours_kept, grad=grad, out=out, **ours, **how)
        step_in_c(rule, state=theirs_kept, grad=grad, out=expected, **theirs, **how)
        mine, other = [*ours.values(), *ours_kept, *outs[:1]], [*theirs.values(), *theirs_kept, *outs[1:]]
        assert [same_bits(*pair) for pair in zip(mine, other, strict=True)] == [True] * len(mine), number
    return [*ours.values(), *ours_kept]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("state_format", "split"), FORMATS)
def test_every_format(
    rule_at: Callable[..., Rule],
    state_format: StateFormat,
    split: bool,
    exact_sqrt: None,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces that begin anywhere, with indices whose upper half changes on the way."""
    generator = torch.Generator().manual_seed(4)
    param = torch.randn(5000, generator=generator)
    state = [torch.zeros(5000), torch.zeros(5000)]
    grads = [torch.randn(5000, generator=generator).to(dtype) for dtype in DTYPES]
    runs = []
    for first_index in (0, (1 << 32) - 2100, 5 << 40):
        for at_once in (1 << 24, 999):
            monkeypatch.setattr(torch_operations, "ELEMENTS_AT_ONCE", at_once)
            how = {"split": split, "first_index": first_index}
            runs.append(assert_same_steps(rule_at, param, state, grads, state_format, **how))
    by_chance = rule_at(1).state_count and state_format is StateFormat.BF16_STOCHASTIC
    assert same_bits(runs[0][-2], runs[2][-2]) != bool(by_chance)


@pytest.mark.parametrize(("state_format", "split"), FORMATS)
def test_every_format_at_the_edges(
    rule_at: Callable[..., Rule], state_format: StateFormat, split: bool, exact_sqrt: None, way: str
) -> None:
    """Each special parameter with each special gradient, twice; state starts from everything, too."""
    param, grad, moment = (t.flatten() for t in torch.meshgrid(SPECIAL, SPECIAL, SPECIAL, indexing="ij"))
    halves = [grad.to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    ours = assert_same_steps(rule_at, param, [moment, moment.abs()], halves, state_format, split=split)
    assert ours[0].isnan().any() and not ours[0].isnan().all()


@pytest.mark.parametrize("state_format", [StateFormat.BF16, StateFormat.BF16_STOCHASTIC])
def test_every_bfloat16_as_state(state_format: StateFormat, exact_sqrt: None, way: str) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    param, generator = torch.zeros(1 << 16), torch.Generator().manual_seed(5)
    grads = [torch.randn(1 << 16, generator=generator) for _ in range(2)]
    for rule_at in RULES.values():
        assert_same_steps(rule_at, param, [every, every.abs()], grads, state_format, split=True)


def test_split_and_join() -> None:
    """Every upper half with lower ones at and beside the tie, and any; what comes back, and what no split makes."""
    uppers = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lowers = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    random = torch.randint(0, 1 << 16, (1 << 16, 6), generator=torch.Generator().manual_seed(6))
    master = torch.cat([uppers | lowers, uppers | random]).flatten().to(torch.int32).view(torch.float32)
    ours, theirs = (
        (torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16))
        for _ in range(2)
    )
    device_kernels.split(master, *ours)
    kernels.split(theirs[0].data_ptr(), theirs[1].data_ptr(), master.data_ptr(), master.numel())
    assert all(map(same_bits, ours, theirs))
    number = ~master.isnan()
    assert same_bits(device_kernels.join(*ours)[number], master[number])
    nonsense = random.flatten().repeat(2).to(torch.int16)
    expected = torch.empty_like(master)
    kernels.join(expected.data_ptr(), ours[0].data_ptr(), nonsense.data_ptr(), master.numel())
    assert same_bits(device_kernels.join(ours[0], nonsense), expected)


def test_launches_are_shared(by_gcc: CompiledByGcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """By segments of one rule and the same dtypes: as many as one takes."""
    monkeypatch.setattr(cuda_library, "kernels_of", lambda tensor: by_gcc)
    generator = torch.Generator().manual_seed(7)
    rules, numels = [adam(3), adam(3, weight_decay=0.0)], [1, 1023, 1024, 1025, 3000] * 20 + [0, 7]
    arrays = [[torch.randn(numel, generator=generator).abs() for _ in range(4)] for numel in numels]
    ours = [
        Segment(rules[i % 5 == 0], param.clone(), [m.clone(), v.clone()], grad)
        for i, (param, m, v, grad) in enumerate(arrays)
    ]
    by_gcc.launched.clear()
    device_kernels.step_segments(ours, 0.37)
    assert by_gcc.launched == ["step<0, 2, 0, 0, 0>"] * (3 + 1)  # of 81 segments, and of 20
    for segment, (param, m, v, grad) in zip(ours, arrays, strict=True):
        step_in_c(segment.rule, param, [m, v], grad, grad_scale=0.37)
        assert all(map(same_bits, [segment.param, *segment.state], [param, m, v]))


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[Segment], list[Segment]]:
    """Twice the same: any rule, formats, lengths and places, of numbers and of bits that are anything."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 32)))

    def numbers(numel: int) -> Tensor:
        bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).to(torch.int32)
        likely = torch.randn(numel, generator=generator)
        return torch.where(torch.rand(numel, generator=generator) < 0.9, likely, bits.view(torch.float32))

    arguments = []
    for _ in range(draw(st.integers(1, 6))):
        numel, split = draw(st.integers(1, 2500)), draw(st.booleans())
        state_format, at = draw(st.sampled_from(StateFormat)), draw(st.integers(0, 3))
        rule = draw(st.sampled_from(list(RULES.values())))(
            draw(st.integers(1, 9)), seed=draw(st.integers(0, 9))
        )
        state = [numbers(at + numel), numbers(at + numel).abs()]
        param, states = by_format(numbers(at + numel), state, state_format, split=split)
        grad = numbers(at + numel).to(draw(st.sampled_from(list(DTYPES))))
        dtype = draw(st.sampled_from([None, *DTYPES])) if not split else None
        out = None if dtype is None else torch.zeros(at + numel, dtype=dtype)
        first_index = draw(st.sampled_from([0, (1 << 32) - 1000, 3 << 33])) + draw(st.integers(0, 99))
        arguments.append((rule, param, states, grad, out, state_format, first_index, at))

    def segment(
        rule: Rule,
        param: dict[str, Tensor],
        states: list[Tensor],
        grad: Tensor,
        out: Tensor | None,
        state_format: StateFormat,
        first_index: int,
        at: int,
    ) -> Segment:
        fresh = {name: tensor.clone()[at:] for name, tensor in param.items()}
        return Segment(
            rule=rule,
            state=[tensor.clone()[at:] for tensor in states],
            grad=grad[at:],
            state_format=state_format,
            out=None if out is None else out.clone()[at:],
            first_index=first_index,
            **fresh,
        )

    first, other = ([segment(*each) for each in arguments] for _ in range(2))
    return first, other


@given(
    drawn=segments(),
    scale=st.sampled_from([1.0, 0.37, 1 / 65536]),
    later=st.sampled_from(list(RULES.values())),
)
@settings(max_examples=60, deadline=None)
def test_any_segments(
    by_gcc: CompiledByGcc,
    drawn: tuple[list[Segment], list[Segment]],
    scale: float,
    later: Callable[..., Rule],
) -> None:
    """One step, and a later one of the same segments by another rule."""
    ours, theirs = drawn
    for rule in (None, later(11, seed=11)):
        for segment in (*ours, *theirs) if rule else ():
            segment.rule = rule
        fused.step(by_gcc, ours, scale)
        for mine, other in zip(ours, theirs, strict=True):
            how = {"remainder": other.remainder, "state_format": other.state_format, "out": other.out}
            how |= {"grad_scale": scale, "first_index": other.first_index}
            step_in_c(other.rule, other.param, list(other.state), other.grad, **how)
            for name in ("param", "remainder", "out"):
                tensor, in_c = getattr(mine, name), getattr(other, name)
                assert tensor is None or same_bits(tensor, in_c), name
            assert all(map(same_bits, mine.state, other.state))
