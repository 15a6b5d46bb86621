"""sum_of_squares: one order for every thread count, instruction set and way of cutting."""

from __future__ import annotations

import itertools
import math
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cpu import kernels
from optim_cpu.exact_sum import UNIT, ExactSum
from optim_cpu.kernels import SQUARE_BLOCK, DType

from . import reference


def total(x: torch.Tensor) -> ExactSum:
    dtype = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}[x.dtype]
    return kernels.sum_of_squares(x.data_ptr(), dtype, x.numel())


def spread(n: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many orders of magnitude, so that another order of summation shows in the last bits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.exp(4 * torch.randn(n, generator=generator))
    return x.clamp(-60000, 60000).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 100, 4095, 4096, 4097, 20_000])
def test_equals_the_written_lane_tree(isa: str, dtype: torch.dtype, n: int) -> None:
    x = spread(n, n, dtype)
    assert total(x) == reference.sum_of_squares(x.float().numpy())


def test_the_order_is_visible_in_the_last_bits() -> None:
    """Otherwise the tests of this file could not fail."""
    x = spread(20_000, 1).numpy().astype(np.float64)
    plain = 0.0
    for value in x:
        plain += value * value
    assert plain != float(reference.sum_of_squares(x.astype(np.float32)))
    assert total(torch.from_numpy(x[1:].astype(np.float32))) != total(torch.from_numpy(x.astype(np.float32)))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    x = spread(1_000_003, 2)
    kernels.set_thread_count(1)
    alone = total(x)
    kernels.set_thread_count(threads)
    assert total(x) == alone
    assert float(alone) == pytest.approx(float((x.double() ** 2).sum()), rel=1e-12)


def test_instruction_sets_agree() -> None:
    x = spread(500_009, 3)
    values = set()
    for name in kernels.available_instruction_sets():
        kernels.set_instruction_set(name)
        values.add(total(x))
    assert len(values) == 1


@given(blocks=st.lists(st.integers(1, 20), max_size=6), tail=st.integers(0, 5000), data=st.data())
@settings(max_examples=40, deadline=None)
def test_pieces_in_any_order_add_up_to_the_whole(blocks: list[int], tail: int, data: st.DataObject) -> None:
    kernels.set_thread_count(data.draw(st.integers(1, 3)))
    x = spread(sum(blocks) * SQUARE_BLOCK + tail, tail)
    ends = [SQUARE_BLOCK * sum(blocks[: number + 1]) for number in range(len(blocks))]
    pieces = [total(x[start:end]) for start, end in itertools.pairwise([0, *ends, x.numel()])]
    assert ExactSum.total(data.draw(st.permutations(pieces))) == total(x)


def test_more_blocks_than_are_summed_at_a_time(isa: str) -> None:
    """Above 8192 blocks the sums come in rounds."""
    n = (8192 + 3) * SQUARE_BLOCK + 17
    x = spread(1 << 20, 4, torch.bfloat16).repeat(n // (1 << 20) + 1)[:n]
    cut = 5000 * SQUARE_BLOCK
    assert total(x) == total(x[cut:]) + total(x[:cut])


@given(values=st.lists(st.floats(0, 2.0**268, allow_subnormal=False), max_size=40))
def test_block_sums_are_added_without_rounding(values: list[float]) -> None:
    """The squares of float32 numbers, and sums of them, are multiples of 2^-298."""
    sums = np.array(
        [math.ldexp(round(math.ldexp(value, 298)), -298) if value < 1 else value for value in values]
    )
    expected = sum((Fraction(float(value)) for value in sums), Fraction())
    for order in (sums, sums[::-1].copy()):
        assert Fraction(kernels.add_block_sums(order.ctypes.data, len(order)).units, UNIT) == expected
    added = kernels.add_block_sums(sums.ctypes.data, len(sums))
    assert ExactSum.of_limbs([float(limb) for limb in added.limbs()]) == added
    assert float(added) == float(expected)


def test_carries_reach_the_last_limb() -> None:
    sums = np.full(100_000, 2.0**268 * (1 - 2.0**-53))
    added = kernels.add_block_sums(sums.ctypes.data, len(sums))
    assert added.units == 100_000 * (2**53 - 1) << (268 - 53 + 320) and added.is_finite
    many = ExactSum.total([added] * 1000)
    assert ExactSum.of_limbs(many.limbs()) == many and max(many.limbs()) < 2**53


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_element_that_is_not_finite_shows(isa: str, bad: float, dtype: torch.dtype) -> None:
    for n in (1, 33, 5000, 100_000):
        for at in {0, n // 2, n - 1}:
            x = spread(n, n, dtype)
            assert total(x).is_finite
            x[at] = bad
            assert total(x) == reference.sum_of_squares(x.float().numpy())
            assert float(total(x)) == pytest.approx(math.inf if math.isinf(bad) else math.nan, nan_ok=True)


def test_the_largest_and_the_smallest_floats_are_finite_and_counted(isa: str) -> None:
    largest = np.finfo(np.float32).max
    total_of_largest = float(total(torch.full((10_000,), float(largest))))
    assert total_of_largest == pytest.approx(1e4 * float(largest) ** 2, rel=1e-12)
    assert float(total(torch.full((64,), 2.0**-149))) == 64 * 2.0**-298


def test_any_alignment(isa: str) -> None:
    x = spread(10_000, 5)
    for skip in range(20):
        assert total(x[skip:]) == reference.sum_of_squares(x[skip:].numpy())


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"sum_of_squares: address must be .*, got 4097"):
        kernels.sum_of_squares(4097, DType.BF16, 1)
    with pytest.raises(ValueError, match=r"sum_of_squares: numel must be .*, got -5"):
        kernels.sum_of_squares(4096, DType.BF16, -5)
    with pytest.raises(ValueError, match=r"sum_of_squares: dtype must be .*, got 7"):
        kernels.sum_of_squares(4096, 7, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"numel must be .*, got {sys.maxsize}"):
        kernels.sum_of_squares(4096, DType.BF16, sys.maxsize)
    with pytest.raises(ValueError, match=r"add_block_sums: count must be .*, got -1"):
        kernels.add_block_sums(4096, -1)
    with pytest.raises(ValueError, match=r"add_block_sums: sums must be .*, got 4097"):
        kernels.add_block_sums(4097, 1)
