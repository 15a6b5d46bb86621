"""reduce: float32 sums in the order of the sources, to the bit of a numpy transcription, in one pass."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_cpu import kernels
from optim_cpu.kernels import DType

from . import reference
from .cases import NUMPY_TYPE, address, decode, encode, hard_mix, same_bits
from .reference import F32, Array

PAIRS = list(itertools.product(DType, DType))
COUNTS = [1, 2, 3, 4, 8]
LENGTHS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 1000, (1 << 15) + 129]


def reduce(
    target: Array, target_dtype: DType, sources: list[Array], source_dtype: DType, **how: Any
) -> Array:
    """A new target; the one given, and the sources, stay as they are."""
    result = target.copy()
    addresses = [address(x) for x in sources]
    kernels.reduce(
        address(result), target_dtype, addresses, source_dtype, len(target), how.pop("factor"), **how
    )
    return result


def expected(
    target: Array, target_dtype: DType, sources: list[Array], source_dtype: DType, **how: Any
) -> Array:
    before = None if how["overwrite"] else decode(target, target_dtype)
    wide = [decode(x, source_dtype) for x in sources]
    return encode(reference.reduce(wide, how["factor"], before), target_dtype)


@functools.cache
def numbers(seed: int, n: int, dtype: DType, *, hard: bool = True) -> Array:
    """Of one magnitude, so that sums round; `hard` ones are also subnormal, huge, infinite or NaN."""
    rng = np.random.default_rng([seed, n])
    x = rng.standard_normal(n, dtype=np.float32)
    encoded = encode(hard_mix(rng, n, x, reference.adversarial(rng, n)) if hard else x, dtype)
    encoded.setflags(write=False)
    return encoded


@pytest.mark.parametrize(("target_dtype", "source_dtype"), PAIRS)
@pytest.mark.parametrize("count", COUNTS)
def test_equals_the_written_formula(isa: str, count: int, target_dtype: DType, source_dtype: DType) -> None:
    for n, overwrite in itertools.product(LENGTHS, (True, False)):
        target = numbers(100, n, target_dtype)
        sources = [numbers(i, n, source_dtype) for i in range(count)]
        how = {"factor": 1 / count, "overwrite": overwrite}
        result = reduce(target, target_dtype, sources, source_dtype, **how)
        assert same_bits(result, expected(target, target_dtype, sources, source_dtype, **how)), (n, overwrite)


def test_the_order_of_the_sources_is_visible_in_the_last_bits() -> None:
    """Otherwise the tests of this file could not fail; nor could they if halves were rounded between adds."""
    n, dtype = 10_000, DType.FP32
    sources = [numbers(i, n, dtype, hard=False) for i in range(4)]
    zeros = np.zeros(n, np.float32)
    how = {"factor": 0.25, "overwrite": True}
    forwards, backwards = (reduce(zeros, dtype, x, dtype, **how) for x in (sources, sources[::-1]))
    assert 1000 < np.count_nonzero(forwards != backwards) < n
    pairs = (sources[0] + sources[1]) + (sources[2] + sources[3])
    assert np.count_nonzero(forwards != pairs * np.float32(0.25)) > 1000

    halves = [encode(x, DType.BF16) for x in sources]
    result = reduce(np.zeros(n, np.uint16), DType.BF16, halves, DType.BF16, **how)
    rounded = encode(decode(halves[0], DType.BF16) + decode(halves[1], DType.BF16), DType.BF16)
    for x in halves[2:]:
        rounded = encode(decode(rounded, DType.BF16) + decode(x, DType.BF16), DType.BF16)
    assert (
        np.count_nonzero(result != encode(decode(rounded, DType.BF16) * np.float32(0.25), DType.BF16)) > 100
    )


def test_the_sum_is_formed_before_it_is_scaled_and_added() -> None:
    """The same elements with the factor first, or the target first, come out otherwise."""
    n, dtype = 10_000, DType.FP32
    target = numbers(100, n, dtype, hard=False)
    sources = [numbers(i, n, dtype, hard=False) for i in range(3)]
    third = np.float32(1 / 3)
    result = reduce(target, dtype, sources, dtype, factor=1 / 3, overwrite=False)
    assert same_bits(result, target + (sources[0] + sources[1] + sources[2]) * third)
    assert (
        np.count_nonzero(result != target + (sources[0] * third + sources[1] * third + sources[2] * third))
        > 100
    )
    assert np.count_nonzero(result != (target + sources[0] * third) + (sources[1] + sources[2]) * third) > 100


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("overwrite", [True, False])
def test_threads_and_tiles_change_no_bit(isa: str, threads: int, overwrite: bool) -> None:
    n = 5 * (1 << 15) + 4321
    target = numbers(100, n, DType.BF16)
    sources = [numbers(i, n, DType.BF16) for i in range(5)]
    kernels.set_thread_count(threads)
    how = {"factor": 0.2, "overwrite": overwrite}
    result = reduce(target, DType.BF16, sources, DType.BF16, **how)
    assert same_bits(result, expected(target, DType.BF16, sources, DType.BF16, **how))


@given(
    n=st.integers(0, 2000),
    skips=st.lists(st.integers(0, 40), min_size=2, max_size=12),
    pair=st.sampled_from(PAIRS),
    name=st.sampled_from(kernels.available_instruction_sets()),
    overwrite=st.booleans(),
    factor=st.sampled_from([1.0, 0.5, 1 / 3, -7.25]),
)
@settings(max_examples=60, deadline=None)
def test_any_alignment_and_nothing_outside(
    n: int, skips: list[int], pair: tuple[DType, DType], name: str, overwrite: bool, factor: float
) -> None:
    """Each array begins some elements into its memory, and as many follow it."""
    kernels.set_instruction_set(name)
    target_dtype, source_dtype = pair
    rooms = [numbers(i, n + 80, source_dtype) for i, _ in enumerate(skips[1:])]
    sources = [room[skip : skip + n] for room, skip in zip(rooms, skips[1:], strict=True)]
    room = numbers(100, n + 80, target_dtype).copy()
    expected_room = room.copy()
    inside = slice(skips[0], skips[0] + n)
    how = {"factor": factor, "overwrite": overwrite}
    expected_room[inside] = expected(room[inside], target_dtype, sources, source_dtype, **how)
    kernels.reduce(
        address(room[inside]), target_dtype, [address(x) for x in sources], source_dtype, n, factor, overwrite=overwrite
    )  # fmt: skip
    assert same_bits(room, expected_room)


def test_many_sources_which_may_be_the_same_memory(isa: str) -> None:
    x = numbers(1, 1000, DType.FP16, hard=False)
    zeros = np.zeros(1000, np.float32)
    how = {"factor": 1 / 4096, "overwrite": True}
    result = reduce(zeros, DType.FP32, [x] * 4096, DType.FP16, **how)
    assert same_bits(result, expected(zeros, DType.FP32, [x] * 4096, DType.FP16, **how))


@pytest.mark.parametrize("target_dtype", list(DType))
@pytest.mark.parametrize("source_dtype", list(DType))
def test_one_source_is_a_cast_or_an_accumulation(isa: str, target_dtype: DType, source_dtype: DType) -> None:
    """By 1, and but for the NaN that a cast hands on as it is."""
    n = 5003
    x, target = numbers(1, n, source_dtype), numbers(2, n, target_dtype)
    added, copied = target.copy(), target.copy()
    kernels.accumulate(address(added), target_dtype, address(x), source_dtype, n, overwrite=False)
    kernels.cast(address(copied), target_dtype, address(x), source_dtype, n)
    assert same_bits(reduce(target, target_dtype, [x], source_dtype, factor=1, overwrite=False), added)
    result = reduce(target, target_dtype, [x], source_dtype, factor=1, overwrite=True)
    number = ~np.isnan(decode(x, source_dtype))
    assert number.any() and not number.all()
    assert same_bits(result[number], copied[number])


QUIET_NAN = {DType.FP32: 0x7FC00000, DType.BF16: 0x7FC0, DType.FP16: 0x7E00}


@pytest.mark.parametrize("target_dtype", list(DType))
@pytest.mark.parametrize("overwrite", [True, False])
def test_where_numbers_end(isa: str, target_dtype: DType, overwrite: bool) -> None:
    """What is no number is the one quiet NaN; the factor comes too late for a sum that overflows."""
    columns: list[list[float]] = [
        [np.inf, -np.inf],
        [np.nan, 1],
        [-np.nan, np.nan],
        [np.inf, 1],
        [-np.inf, -np.inf],
        [3e38, 3e38],
        [-0.0, -0.0],
        [0.0, -0.0],
        [2.0**-149, 2.0**-149],
    ]
    first, second = np.array(columns * 20, np.float32).T.copy()
    zeros = np.zeros(len(first), NUMPY_TYPE[target_dtype])
    result = reduce(zeros, target_dtype, [first, second], DType.FP32, factor=0.5, overwrite=overwrite)
    bits = result.view(np.uint32 if target_dtype is DType.FP32 else np.uint16).reshape(20, -1)
    assert (bits[:, :3] == QUIET_NAN[target_dtype]).all()
    wide = decode(result, target_dtype).reshape(20, -1)
    smallest = 2.0**-149 if target_dtype is DType.FP32 else 0.0
    assert (wide[:, 3:] == [np.inf, -np.inf, np.inf, 0, 0, smallest]).all()
    assert (np.signbit(wide[:, 6]) == overwrite).all() and not np.signbit(wide[:, 7]).any()
    by_zero = reduce(zeros, target_dtype, [first, second], DType.FP32, factor=0, overwrite=overwrite)
    nan = np.isnan(decode(by_zero, target_dtype)).reshape(20, -1)
    assert (nan == [True] * 6 + [False] * 3).all()


def test_the_factor_is_rounded_to_float32(isa: str) -> None:
    x = numbers(1, 1000, DType.FP32, hard=False)
    how: dict[str, Any] = {"overwrite": True}
    result = reduce(x, DType.FP32, [x], DType.FP32, factor=1 / 3, **how)
    assert same_bits(result, x * np.float32(1 / 3))
    tiny: F32 = np.full(100, 2.0**127, np.float32)
    result = reduce(tiny, DType.FP32, [tiny], DType.FP32, factor=2.0**-140, **how)
    assert (result == 2.0**-13).all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("numel", -1),
        ("target", 0),
        ("target", 4098),
        ("target_dtype", 3),
        ("source_dtype", -1),
        ("sources", []),
        ("sources", [8192, 0]),
        ("sources", [8193, 16384]),
    ],
)
def test_a_bad_argument_is_named(argument: str, value: Any) -> None:
    good: dict[str, Any] = {
        "target": 4096,
        "target_dtype": DType.FP32,
        "sources": [8192, 16384],
        "source_dtype": DType.BF16,
        "numel": 4,
        "factor": 0.5,
    }
    with pytest.raises(ValueError, match=rf"reduce: {argument} must .*, got {re.escape(str(value))}"):
        kernels.reduce(**(good | {argument: value}), overwrite=False)


def test_no_elements_need_no_memory() -> None:
    kernels.reduce(0, DType.FP32, [0, 0], DType.BF16, 0, 0.5, overwrite=True)
