"""A split parameter is its float32 master, exactly: value by value, and over hundreds of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim_cpu import formats, kernels
from optim_cpu.kernels import DType, StateFormat, StepBatch

from . import reference
from .cases import Kind, address, encode, same_bits
from .reference import F32, Array


def split(x: F32) -> tuple[Array, Array]:
    param, remainder = np.empty(len(x), np.uint16), np.empty(len(x), np.int16)
    kernels.split(address(param), address(remainder), address(x), len(x))
    return param, remainder


def join(param: Array, remainder: Array) -> F32:
    x = np.empty(len(param), np.float32)
    kernels.join(address(x), address(param), address(remainder), len(x))
    return x


def patterns(uppers: Array) -> F32:
    """Each upper half with all 65536 lower ones."""
    upper = np.asarray(uppers, np.uint32) << np.uint32(16)
    return (upper[:, None] | np.arange(1 << 16, dtype=np.uint32)).reshape(-1).view(np.float32)


def assert_reversible(x: F32) -> None:
    param, remainder = split(x)
    canonical = reference.canonical(x)
    assert same_bits(join(param, remainder), canonical)
    assert same_bits(param, reference.f32_to_bf16_away(canonical))
    alone = np.empty_like(param)
    kernels.split(address(alone), 0, address(x), len(x))
    assert same_bits(alone, param)


def test_sixteen_million_floats_come_back(isa: str) -> None:
    """Both signs of zero, the smallest and the largest, what borders on infinity, and one of each exponent."""
    rng = np.random.default_rng(1)
    edges = [0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF]
    exponents = (np.arange(256) << 7) + rng.integers(0, 1 << 7, 256) + (rng.integers(0, 2, 256) << 15)
    assert_reversible(patterns(np.concatenate([edges, exponents])))


@pytest.mark.slow
def test_every_float_comes_back() -> None:
    for first in range(0, 1 << 16, 256):
        assert_reversible(patterns(np.arange(first, first + 256)))


def test_every_pair_of_halves_is_a_float_and_survives_joining(isa: str) -> None:
    """Also those that no split makes: they are the sum that kernels.h writes down."""
    rng = np.random.default_rng(2)
    param = rng.integers(0, 1 << 16, 1 << 20).astype(np.uint16)
    remainder = rng.integers(-(1 << 15), 1 << 15, 1 << 20).astype(np.int16)
    x = join(param, remainder)
    assert same_bits(x, reference.join(param, remainder))
    number = ~np.isnan(x)
    assert same_bits(join(*split(x))[number], x[number])


def test_a_parameter_is_the_nearest_bfloat16_ties_away_from_zero() -> None:
    """Said once more, in real numbers: the distances to both neighbours."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 0x7F7F0000, 200_000, dtype=np.uint32)
    x[::3] = (x[::3] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    for bits in (x, x | np.uint32(0x80000000)):
        value = bits.view(np.float32)
        result = reference.bf16_to_f32(split(value)[0]).astype(np.float64)
        below = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        above = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
        to_below, to_above = np.abs(value - below), np.abs(above - value)
        assert np.array_equal(result, np.where(to_above <= to_below, above, below))


@given(
    n=st.integers(0, 500), skip=st.integers(0, 40), name=st.sampled_from(kernels.available_instruction_sets())
)
def test_any_length_at_any_address_and_nothing_outside(n: int, skip: int, name: str) -> None:
    kernels.set_instruction_set(name)
    x = reference.adversarial(np.random.default_rng(n), n + 80)
    param, remainder = np.full(n + 80, 0xABCD, np.uint16), np.full(n + 80, 0x1234, np.int16)
    kernels.split(address(param[skip:]), address(remainder[40:]), address(x[17:]), n)
    halves = reference.split(x[17 : 17 + n])
    assert same_bits(param[skip : skip + n], halves[0]) and same_bits(remainder[40 : 40 + n], halves[1])
    back = np.full(n + 80, 7, np.float32)
    kernels.join(address(back[skip:]), address(param[skip:]), address(remainder[40:]), n)
    assert same_bits(back[skip : skip + n], reference.canonical(x[17 : 17 + n]))
    for array, at, rest in ((param, skip, 0xABCD), (remainder, 40, 0x1234), (back, skip, 7)):
        assert (array[:at] == rest).all() and (array[at + n :] == rest).all()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_share_the_work(isa: str, threads: int) -> None:
    kernels.set_thread_count(threads)
    x = reference.adversarial(np.random.default_rng(4), 5 * (1 << 15) + 13)
    param, remainder = split(x)
    halves = reference.split(x)
    assert same_bits(param, halves[0]) and same_bits(remainder, halves[1])
    assert same_bits(join(param, remainder), reference.canonical(x))


OPTIMIZERS = [
    Kind("adam").but(lr=1e-2),
    Kind("adam").but(lr=1e-2, decoupled=False),
    Kind("lion"),
    Kind("adagrad"),
    Kind("sgd").but(nesterov=True, dampening=0.0),
    Kind("sgd").but(momentum=0.0),
]


@pytest.mark.parametrize("state_format", list(StateFormat))
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=str)
def test_hundreds_of_steps_equal_those_with_a_float32_master(kind: Kind, state_format: StateFormat) -> None:
    """The same masters, the same bfloat16 parameters after every step, the same state; gradients in bfloat16."""
    n, rng = 1501, np.random.default_rng(5)
    master = rng.standard_normal(n, dtype=np.float32)
    master[:64] = reference.adversarial(rng, 64)
    param, remainder = split(master)
    out, grad = np.empty(n, np.uint16), np.empty(n, np.uint16)
    dtype = np.float32 if state_format is StateFormat.FP32 else np.uint16
    state, split_state = ([np.zeros(n, dtype) for _ in range(kind.state_count)] for _ in range(2))
    batch = StepBatch()
    rule = batch.add_rule(kind.rule())
    common: dict[str, Any] = {
        "grad": address(grad),
        "grad_dtype": DType.BF16,
        "state_format": state_format,
        "first_index": 1 << 33,
    }
    batch.add(n, rule, param=address(master), state=tuple(map(address, state)), out=address(out), **common)
    batch.add(
        n, rule, param=address(param), remainder=address(remainder), state=tuple(map(address, split_state)), **common
    )  # fmt: skip
    start = master.copy()
    for t in range(1, 301):
        grad[:] = encode(rng.standard_normal(n, dtype=np.float32), DType.BF16)
        batch.set_rule(rule, kind.but(step=t).rule())
        batch.run(0.5)
        assert same_bits(param, out), t
        if t % 50 == 0:
            assert same_bits(join(param, remainder), master), t
    assert same_bits(join(param, remainder), master)
    assert all(same_bits(a, b) for a, b in zip(state, split_state, strict=True))
    assert (np.abs(master - start)[64:] > 1e-3).mean() > 0.9  # it went somewhere
    assert (remainder != 0).mean() > 0.9


# On tensors.


def test_tensors_split_and_join() -> None:
    x = torch.from_numpy(reference.adversarial(np.random.default_rng(6), 1200)).reshape(30, 40)
    param, remainder = formats.split(x)
    assert (param.dtype, remainder.dtype, param.shape) == (torch.bfloat16, torch.int16, x.shape)
    halves = reference.split(x.numpy().reshape(-1))
    assert same_bits(param.view(torch.uint16).numpy().reshape(-1), halves[0])
    assert same_bits(remainder.numpy().reshape(-1), halves[1])
    back = formats.join(param, remainder)
    assert back.shape == x.shape
    assert same_bits(back.numpy().reshape(-1), reference.canonical(x.numpy().reshape(-1)))
    assert same_bits(formats.join(param.t(), remainder.t()).numpy(), back.t().contiguous().numpy())


def test_parameters_are_rounded_as_the_optimizers_do() -> None:
    x = torch.from_numpy(patterns(np.array([0x3F80, 0xBF81, 0x7F7F])))
    out = torch.empty(len(x), dtype=torch.bfloat16)
    formats.round_parameters(x, out)
    assert same_bits(out.view(torch.uint16).numpy(), reference.f32_to_bf16_away(x.numpy()))
    half = torch.empty(len(x), dtype=torch.float16)
    formats.round_parameters(x, half)
    assert torch.equal(half, x.half())
    wide = torch.empty(len(x))
    formats.round_parameters(out, wide)
    assert torch.equal(wide, out.float())
    formats.round_parameters(x.half(), out)
    assert same_bits(out.view(torch.uint16).numpy(), reference.f32_to_bf16_away(x.half().float().numpy()))


def test_a_wrong_tensor_is_told() -> None:
    x, half, rest = (
        torch.ones(4, 4),
        torch.ones(4, 4, dtype=torch.bfloat16),
        torch.ones(4, 4, dtype=torch.int16),
    )
    with pytest.raises(TypeError, match=r"the master is torch.float64; it must be float32"):
        formats.split(x.double())
    with pytest.raises(ValueError, match=r"a tensor is on meta; it must be on the CPU"):
        formats.split(x.to("meta"))
    with pytest.raises(
        TypeError, match=r"param is torch.float16 and remainder torch.int16; they must be bfloat16"
    ):
        formats.join(half.half(), rest)
    with pytest.raises(TypeError, match=r"remainder torch.int32"):
        formats.join(half, rest.int())
    with pytest.raises(ValueError, match=r"shapes \(4, 4\) and \(16,\) must be equal"):
        formats.join(half, rest.reshape(-1))
    with pytest.raises(ValueError, match=r"and both contiguous"):
        formats.round_parameters(x, half.t())
    with pytest.raises(ValueError, match=r"shapes \(4, 4\) and \(4,\) must be equal"):
        formats.round_parameters(x, half[0])
