"""cast and accumulate: every 16-bit pattern, and equality with torch and numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cpu import kernels
from optim_cpu.kernels import DType

from . import reference

TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
ALL_HALVES = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
QUIET_NAN = {DType.FP32: 0x7FC00000, DType.BF16: 0x7FC0, DType.FP16: 0x7E00}
PAIRS = list(itertools.product(DType, DType))


def cast(x: torch.Tensor, to: DType) -> torch.Tensor:
    source = next(d for d, t in TORCH.items() if t == x.dtype)
    out = torch.empty(x.numel(), dtype=TORCH[to])
    kernels.cast(out.data_ptr(), to, x.data_ptr(), source, x.numel())
    return out


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def assert_same_but_for_nan(result: torch.Tensor, want: torch.Tensor) -> None:
    """torch's NaN patterns differ between its scalar and its vector code: only NaN-ness is compared."""
    assert torch.equal(result.isnan(), want.isnan())
    keep = ~want.isnan()
    assert torch.equal(bits(result)[keep], bits(want)[keep])


def hard_floats(n: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(reference.adversarial(np.random.default_rng(seed), n))


def floats_around_halves(dtype: torch.dtype) -> torch.Tensor:
    """Every finite 16-bit value, the midpoint to the next one, and the float32 neighbours of both."""
    values = ALL_HALVES.view(dtype).float()
    values = values[values.isfinite()]
    following = torch.cat([values[1:], values[:1]])
    middle = values / 2 + following / 2
    around = [values, middle]
    around += [torch.nextafter(x, torch.tensor(s * torch.inf)) for x in (values, middle) for s in (1, -1)]
    return torch.cat(around).contiguous()


@pytest.mark.parametrize("source", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("to", list(DType))
def test_every_half_casts_as_torch_does(isa: str, source: DType, to: DType) -> None:
    x = ALL_HALVES.view(TORCH[source])
    assert_same_but_for_nan(cast(x, to), x.to(TORCH[to]))


@pytest.mark.parametrize("half", [DType.BF16, DType.FP16])
def test_floats_around_every_half_round_as_torch_does(isa: str, half: DType) -> None:
    for x in (floats_around_halves(TORCH[half]), hard_floats(200_003, 1)):
        assert_same_but_for_nan(cast(x, half), x.to(TORCH[half]))


def test_bf16_rounding_equals_exact_arithmetic_nan_included(isa: str) -> None:
    x = hard_floats(100_000, 2)
    assert np.array_equal(cast(x, DType.BF16).view(torch.uint16).numpy(), reference.f32_to_bf16(x.numpy()))


@pytest.mark.parametrize("half", [DType.BF16, DType.FP16])
def test_a_half_survives_the_way_to_float_and_back(isa: str, half: DType) -> None:
    back = cast(cast(ALL_HALVES.view(TORCH[half]), DType.FP32), half)
    x = ALL_HALVES.view(TORCH[half])
    quiet = torch.where(x.isnan(), bits(x) | (0x40 if half is DType.BF16 else 0x200), bits(x))
    assert torch.equal(bits(back), quiet)


def test_all_instruction_sets_give_the_same_bits_nan_included() -> None:
    for source, to in PAIRS:
        results = []
        for name in kernels.available_instruction_sets():
            kernels.set_instruction_set(name)
            x = hard_floats(10_007, 3) if source is DType.FP32 else ALL_HALVES.view(TORCH[source])
            y = hard_floats(x.numel(), 4).to(TORCH[to])
            kernels.accumulate(y.data_ptr(), to, x.data_ptr(), source, x.numel(), overwrite=False)
            results.append((bits(cast(x, to)), bits(y)))
        for cast_bits, sum_bits in results[1:]:
            assert torch.equal(cast_bits, results[0][0])
            assert torch.equal(sum_bits, results[0][1])


@pytest.mark.parametrize(("dst_dtype", "src_dtype"), PAIRS)
def test_accumulate_adds_in_float32_and_rounds_once(isa: str, dst_dtype: DType, src_dtype: DType) -> None:
    for n in [*range(70), 100_001]:
        dst = hard_floats(n, n).to(TORCH[dst_dtype])
        src = hard_floats(n, n + 1).to(TORCH[src_dtype])
        expected = cast(dst.float() + src.float(), dst_dtype)
        kernels.accumulate(dst.data_ptr(), dst_dtype, src.data_ptr(), src_dtype, n, overwrite=False)
        assert_same_but_for_nan(dst, expected)
        assert (bits(dst)[dst.isnan()] == QUIET_NAN[dst_dtype]).all()
        kernels.accumulate(dst.data_ptr(), dst_dtype, src.data_ptr(), src_dtype, n, overwrite=True)
        assert torch.equal(bits(dst), bits(cast(src, dst_dtype)))


@given(
    n=st.integers(0, 5000),
    skip=st.integers(0, 40),
    pair=st.sampled_from(PAIRS),
    name=st.sampled_from(kernels.available_instruction_sets()),
    overwrite=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_alignment_and_nothing_outside(
    n: int, skip: int, pair: tuple[DType, DType], name: str, overwrite: bool
) -> None:
    kernels.set_instruction_set(name)
    dst_dtype, src_dtype = pair
    dst = torch.linspace(-3, 3, n + 80).to(TORCH[dst_dtype])
    src = torch.linspace(7, -9, n + 80).to(TORCH[src_dtype])
    expected = dst.clone()
    added = src[40 : 40 + n].float()
    if not overwrite:  # adding 0 would lose the sign of a -0.0, which a copy keeps
        added = added + dst[skip : skip + n].float()
    expected[skip : skip + n] = added.to(TORCH[dst_dtype])
    kernels.accumulate(
        dst[skip:].data_ptr(), dst_dtype, src[40:].data_ptr(), src_dtype, n, overwrite=overwrite
    )
    assert torch.equal(bits(dst), bits(expected))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("numel", -1), ("dst", 0), ("dst", 4098), ("src", 4097), ("dst_dtype", 3), ("src_dtype", -1)],
)
def test_a_bad_argument_is_named(argument: str, value: Any) -> None:
    good: dict[str, Any] = {
        "dst": 4096,
        "dst_dtype": DType.FP32,
        "src": 8192,
        "src_dtype": DType.BF16,
        "numel": 4,
    }
    with pytest.raises(ValueError, match=rf"accumulate: {argument} must be .*, got {value}"):
        kernels.accumulate(**(good | {argument: value}), overwrite=False)
    with pytest.raises(ValueError, match=rf"cast: {argument} must be .*, got {value}"):
        kernels.cast(**(good | {argument: value}))
