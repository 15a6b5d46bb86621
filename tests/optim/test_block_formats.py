"""Block formats equal a float32 numpy transcription of ``csrc/kernels.h``, within the error that a format allows."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from optim_cpu import block_kernels, kernels
from optim_cpu.block_kernels import SCALE_GROUP, BlockFormat, QuantizedMatrix
from optim_cpu.kernels import DType

from . import reference
from .cases import Array, address, decode, encode, same_bits
from .reference import F32, U16

# QLoRA's codebook, as bitsandbytes publishes it.
# fmt: off
CODEBOOK = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)
# fmt: on
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
FULL = {BlockFormat.NF4: 1, BlockFormat.INT8: 127, BlockFormat.FP8: 448}
SHAPES = [(3, 64, 32), (7, 192, 64), (67, 1024, 64), (1, 4096, 4096), (5, 8448, 128)]


def dynamic_map() -> F32:
    """The map from its definition: decades of 1, 2, .. 64 equal parts of [0.1, 1], each by its middle."""
    middles = [
        (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (decade - 6)
        for decade in range(7)
        for parts in [2**decade]
        for part in range(parts)
    ]
    return np.array(sorted([*middles, 0, 1, *(-x for x in middles)]), np.float32)


def nearest(book: F32, c: F32) -> Array:
    midpoints = (book[:-1] + book[1:]) / np.float32(2)
    return np.searchsorted(midpoints, c, side="left").astype(np.uint8)


def quantize(format: BlockFormat, x: F32, block: int) -> tuple[Array, F32]:
    """The value's codes, one byte for each element, and the scales."""
    blocks = x.reshape(-1, block)
    with np.errstate(all="ignore"):
        scales = np.abs(blocks).max(1) / np.float32(FULL[format])
        finite = np.isfinite(blocks).all(1)
        zero = ~finite | (scales < np.float32(2.0**-126))
        scales = np.where(finite, np.where(zero, np.float32(0), scales), np.float32(np.nan))
        c = blocks / scales[:, None]
    c[zero] = 0
    if format is BlockFormat.NF4:
        codes = nearest(CODEBOOK, c)
    elif format is BlockFormat.INT8:
        codes = np.rint(c).astype(np.int8).view(np.uint8)
    else:
        codes = torch.from_numpy(c).to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
    codes[zero] = 7 if format is BlockFormat.NF4 else 0
    return codes.reshape(-1), scales.astype(np.float32)


def pack(codes: Array) -> Array:
    halves = codes.reshape(-1, 2, 16)
    return (halves[:, 0] | halves[:, 1] << 4).reshape(-1)


def values(format: BlockFormat, codes: Array) -> F32:
    if format is BlockFormat.NF4:
        return CODEBOOK[codes]
    return codes.view(np.int8).astype(np.float32) if format is BlockFormat.INT8 else E4M3[codes]


def quantize_scales(scales: F32) -> tuple[Array, F32, F32]:
    """Codes, group scales and offset of the scales."""
    total = 0.0
    for scale in scales.tolist():
        total += scale
    offset = np.float32(total / len(scales))
    padded = np.concatenate([scales - offset, np.zeros(-len(scales) % SCALE_GROUP, np.float32)])
    groups = padded.reshape(-1, SCALE_GROUP)
    most = np.abs(groups).max(1)
    c = groups / np.where(most > 0, most, np.float32(1))[:, None]
    codes = nearest(dynamic_map(), c.reshape(-1))[: len(scales)]
    return codes, most, np.array([offset])


def product(x: F32, w: F32) -> F32:
    lanes = np.zeros((len(x), len(w), 32), np.float32)
    for i in range(0, x.shape[1], 32):
        lanes += x[:, None, i : i + 32] * w[None, :, i : i + 32]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return lanes[..., 0]


@functools.cache
def fused_multiply_add() -> np.ufunc:
    """float32(a * b + c), rounded once, by the C library."""
    fmaf = ctypes.CDLL(None).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return np.frompyfunc(fmaf, 3, 1)


def product_bf16(x: U16, w: U16) -> U16:
    """One lane for each pair of elements, to which the second is added first."""
    fma = fused_multiply_add()
    x32, w32 = reference.bf16_to_f32(x)[:, None, :], reference.bf16_to_f32(w)[None, :, :]
    lanes = np.zeros((len(x), len(w), 16), np.float32)
    for i in range(0, x.shape[1], 32):
        for first in (i + 1, i):
            at = slice(first, i + 32, 2)
            lanes = fma(x32[..., at], w32[..., at], lanes).astype(np.float32)
    with np.errstate(all="ignore"):
        while lanes.shape[-1] > 1:
            lanes = lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]
    return reference.f32_to_bf16(reference.canonical(lanes[..., 0]))


def transposed_product_bf16(x: U16, w: U16) -> U16:
    """One lane, to which the second row of each pair is added first."""
    fma = fused_multiply_add()
    even = ((0, 0), (0, x.shape[1] % 2))
    x32, w32 = reference.bf16_to_f32(np.pad(x, even)), reference.bf16_to_f32(np.pad(w, even[::-1]))
    sums = np.zeros((len(x), w.shape[1]), np.float32)
    for i in range(0, len(w32), 2):
        for row in (i + 1, i):
            sums = fma(x32[:, row, None], w32[None, row], sums).astype(np.float32)
    return reference.f32_to_bf16(reference.canonical(sums))


class Quantized:
    """A matrix that the kernels have encoded."""

    def __init__(self, format: BlockFormat, w: Array, block: int, dtype: DType, *, double: bool) -> None:
        self.format, (self.rows, self.columns), self.block = format, w.shape, block
        numel = w.size
        self.codes = np.zeros(numel // 2 if format is BlockFormat.NF4 else numel, np.uint8)
        self.scales = np.zeros(numel // block, np.float32)
        block_kernels.quantize(
            format, address(self.codes), address(self.scales), address(w), dtype, numel, block
        )
        self.scale_codes = np.zeros(numel // block, np.uint8)
        self.group_scales = np.zeros(-(-len(self.scales) // SCALE_GROUP), np.float32)
        self.offset = np.zeros(1, np.float32)
        made = (self.scale_codes, self.group_scales, self.offset)
        block_kernels.quantize_scales(*map(address, made), address(self.scales), len(self.scales))
        scales = self.scale_codes if double else self.scales
        group_scales = address(self.group_scales) if double else 0
        offset = address(self.offset)
        scaled = {"scales": address(scales), "group_scales": group_scales, "offset": offset}
        self.matrix = QuantizedMatrix(format, *w.shape, block, codes=address(self.codes), **scaled)

    def decoded(self, dtype: DType, rows: slice = slice(None), columns: slice = slice(None)) -> Array:
        first, end, _ = rows.indices(self.rows)
        left, right, _ = columns.indices(self.columns)
        out = np.zeros((end - first, right - left), np.float32 if dtype is DType.FP32 else np.uint16)
        block_kernels.dequantize(address(out), dtype, self.matrix, (first, end - first), (left, right - left))
        return out.view(np.float16) if dtype is DType.FP16 else out

    def multiplied(self, x: F32) -> F32:
        y = np.zeros((len(x), self.rows), np.float32)
        block_kernels.quantized_product(address(y), address(x), len(x), self.matrix)
        return y

    def multiplied_bf16(self, x: U16) -> U16:
        y = np.zeros((len(x), self.rows), np.uint16)
        block_kernels.quantized_product_bf16(address(y), address(x), len(x), self.matrix)
        return y

    def multiplied_transposed_bf16(self, x: U16) -> U16:
        y = np.zeros((len(x), self.columns), np.uint16)
        block_kernels.quantized_transposed_product_bf16(address(y), address(x), len(x), self.matrix)
        return y


def weights(shape: tuple[int, int], seed: int = 0) -> F32:
    """Blocks of many magnitudes, some of them zero, subnormal or large."""
    rng = np.random.default_rng([seed, *shape])
    w = rng.standard_normal(shape, dtype=np.float32)
    magnitudes = rng.choice(
        np.array([1, 1e-2, 1e-30, 1e-40, 0, 1e30], np.float32), (shape[0], shape[1] // 32)
    )
    w *= np.repeat(magnitudes, 32, 1)
    flat = w.reshape(-1)
    flat[:16] = CODEBOOK
    flat[16:31] = (CODEBOOK[1:] + CODEBOOK[:-1]) / np.float32(2)  # ties go down
    return w


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("format", list(BlockFormat))
def test_codes_scales_and_decoded_values_are_as_written(
    isa: str, format: BlockFormat, dtype: DType, double: bool
) -> None:
    kernels.set_thread_count(2)
    for shape in SHAPES:
        *shape, block = shape
        stored = encode(weights((shape[0], shape[1])), dtype)
        with np.errstate(all="ignore"):
            stored = np.where(np.isfinite(decode(stored, dtype)), stored, 1).astype(stored.dtype)
        w = np.ascontiguousarray(decode(stored, dtype))
        quantized = Quantized(format, stored, block, dtype, double=double)
        codes, scales = quantize(format, w, block)
        assert same_bits(quantized.codes, pack(codes) if format is BlockFormat.NF4 else codes)
        assert same_bits(quantized.scales, scales)
        if double:
            scale_codes, group_scales, offset = quantize_scales(scales)
            assert same_bits(quantized.scale_codes, scale_codes)
            assert same_bits(quantized.group_scales, group_scales) and same_bits(quantized.offset, offset)
            scales = dynamic_map()[scale_codes] * np.repeat(group_scales, SCALE_GROUP)[: len(scales)] + offset
        decoded = (values(format, codes).reshape(-1, block) * scales[:, None]).reshape(shape)
        assert same_bits(quantized.decoded(DType.FP32), decoded)
        assert same_bits(quantized.decoded(DType.BF16), reference.f32_to_bf16(decoded))
        with np.errstate(over="ignore"):
            assert same_bits(quantized.decoded(DType.FP16), decoded.astype(np.float16))
        part = slice(shape[0] // 2, None), slice(block, max(block, shape[1] - block))
        assert same_bits(quantized.decoded(DType.FP32, *part), decoded[part])


@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_product_adds_in_one_order(isa: str, format: BlockFormat) -> None:
    for (rows, columns, block), threads in zip(SHAPES, (1, 2, 3, 1, 2), strict=True):
        kernels.set_thread_count(threads)
        rng = np.random.default_rng(columns)
        quantized = Quantized(
            format, rng.standard_normal((rows, columns), np.float32), block, DType.FP32, double=True
        )
        x = rng.standard_normal((7, columns), np.float32)
        w = quantized.decoded(DType.FP32)
        expected = product(x, w)
        np.testing.assert_allclose(expected, x.astype(np.float64) @ w.T, rtol=1e-5, atol=1e-4)
        for x_rows in (1, 2, 3, 7):
            assert same_bits(quantized.multiplied(x[:x_rows]), expected[:x_rows]), x_rows


# The last one crosses 64 scales, 512 columns and 8 rows, also of x; 40 rows of x share a panel, and those after 32
# another one.
SHAPES_BF16 = [(3, 64, 32), (7, 192, 64), (1, 4096, 4096), (13, 2144, 32)]
X_ROWS = {(7, 192): 40, (13, 2144): 9}


@functools.cache
def a_product_bf16(
    format: BlockFormat, shape: tuple[int, int, int], double: bool
) -> tuple[Quantized, U16, U16]:
    """A matrix, inputs and their product."""
    rows, columns, block = shape
    rng = np.random.default_rng(columns)
    w = rng.standard_normal((rows, columns), np.float32)
    quantized = Quantized(format, w, block, DType.FP32, double=double)
    x = reference.f32_to_bf16(rng.standard_normal((X_ROWS.get((rows, columns), 3), columns), np.float32))
    decoded = quantized.decoded(DType.BF16)
    expected = product_bf16(x, decoded)
    exact = reference.bf16_to_f32(x).astype(np.float64) @ reference.bf16_to_f32(decoded).T
    np.testing.assert_allclose(reference.bf16_to_f32(expected), exact, rtol=2**-8, atol=1e-4)
    return quantized, x, expected


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_product_in_bfloat16_is_a_chain_of_fused_multiply_adds(
    isa: str, format: BlockFormat, double: bool
) -> None:
    for shape, threads in zip(SHAPES_BF16, (1, 2, 1, 3), strict=True):
        kernels.set_thread_count(threads)
        quantized, x, expected = a_product_bf16(format, shape, double)
        for x_rows in sorted({1, 2, 3, *range(4, len(x) + 1, 3), len(x)}):
            assert same_bits(quantized.multiplied_bf16(x[:x_rows]), expected[:x_rows]), (shape, x_rows)


@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_transposed_product_adds_pairs_of_rows_to_one_lane(isa: str, format: BlockFormat) -> None:
    # An odd number of rows; more than 32 of them, or of x; more than 256 columns, and no whole tile of them.
    for (rows, columns, block), many, threads in (
        ((7, 192, 64), 40, 1),
        ((35, 288, 32), 5, 2),
        ((2, 64, 64), 3, 3),
    ):
        kernels.set_thread_count(threads)
        quantized, x, expected = a_transposed_product_bf16(format, (rows, columns, block), many)
        for x_rows in sorted({1, 2, 3, 4, many}):
            y = quantized.multiplied_transposed_bf16(x[:x_rows])
            assert same_bits(y, expected[:x_rows]), (rows, x_rows)


@functools.cache
def a_transposed_product_bf16(
    format: BlockFormat, shape: tuple[int, int, int], x_rows: int
) -> tuple[Quantized, U16, U16]:
    rows, columns, block = shape
    rng = np.random.default_rng(columns)
    quantized = Quantized(
        format, rng.standard_normal((rows, columns), np.float32), block, DType.FP32, double=True
    )
    x = reference.f32_to_bf16(rng.standard_normal((x_rows, rows), np.float32))
    decoded = quantized.decoded(DType.BF16)
    expected = transposed_product_bf16(x, decoded)
    exact = reference.bf16_to_f32(x).astype(np.float64) @ reference.bf16_to_f32(decoded)
    np.testing.assert_allclose(reference.bf16_to_f32(expected), exact, rtol=2**-8, atol=1e-4)
    return quantized, x, expected


@functools.cache
def a_wild_product_bf16(
    format: BlockFormat, magnitude: float, x_kind: str
) -> tuple[Quantized, U16, U16, U16]:
    """As above, with weights of a magnitude: some scales of a row are zero, subnormal, or NaN.

    The last array is the transposed product with the first columns of the inputs.
    """
    rng = np.random.default_rng([int(format), len(x_kind)])
    w = rng.standard_normal((5, 256), np.float32) * np.float32(magnitude)
    w[:, 32:64] *= np.float32(2.0**-30)
    w[1, 64:128] = 0
    w[4, 70] = math.nan
    quantized = Quantized(format, w, 32, DType.FP32, double=False)
    normal = rng.standard_normal((9, 256), np.float32)
    if x_kind == "any bits":
        x = rng.integers(0, 1 << 16, (9, 256)).astype(np.uint16)
    elif x_kind == "few infinities":
        normal.reshape(-1)[:: 256 * 2 + 7] = math.inf
        x = reference.f32_to_bf16(normal)
    else:
        x = reference.f32_to_bf16(normal * np.float32(float(x_kind)))
    with np.errstate(all="ignore"):
        decoded = quantized.decoded(DType.BF16)
        return quantized, x, product_bf16(x, decoded), transposed_product_bf16(x[:, :5], decoded)


@pytest.mark.parametrize("x_kind", ["1e-5", "1e-19", "1e-22", "1e-38", "1e-40", "few infinities", "any bits"])
@pytest.mark.parametrize("magnitude", [1, 1e-8, 1e-12, 1e-20, 1e-36, 1e36])
@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_product_in_bfloat16_flushes_nothing(
    isa: str, format: BlockFormat, magnitude: float, x_kind: str
) -> None:
    quantized, x, expected, transposed = a_wild_product_bf16(format, magnitude, x_kind)
    few = np.ascontiguousarray(x[:, :5])
    for x_rows in (1, 2, 3, 4, 9):
        assert same_bits(quantized.multiplied_bf16(x[:x_rows]), expected[:x_rows]), x_rows
        assert same_bits(quantized.multiplied_transposed_bf16(few[:x_rows]), transposed[:x_rows]), x_rows


@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_product_in_bfloat16_keeps_subnormal_sums_from_panel_to_panel(
    isa: str, format: BlockFormat
) -> None:
    """The first of three panels has small scales. Inputs of the second are 0, and some of the third."""
    rng = np.random.default_rng(int(format))
    w = rng.standard_normal((5, 3 * 512), np.float32)
    w[:, :512] *= np.float32(1e-20)
    x32 = rng.standard_normal((9, 3 * 512), np.float32) * np.float32(1e-20)
    x32[:, 512:1024] = 0
    x32[:5, 1024:] = 0
    quantized = Quantized(format, w, 32, DType.FP32, double=False)
    x = reference.f32_to_bf16(x32)
    expected = product_bf16(x, quantized.decoded(DType.BF16))
    sizes = expected[:5] & 0x7FFF
    assert ((sizes > 0) & (sizes < 0x80)).sum() >= 20
    for x_rows in (1, 2, 3, 4, 9):
        assert same_bits(quantized.multiplied_bf16(x[:x_rows]), expected[:x_rows]), x_rows


@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_transposed_product_keeps_subnormal_sums_from_panel_to_panel(
    isa: str, format: BlockFormat
) -> None:
    """As above, with panels of 32 rows."""
    rng = np.random.default_rng(int(format))
    w = rng.standard_normal((3 * 32, 64), np.float32)
    w[:32] *= np.float32(1e-20)
    x32 = rng.standard_normal((9, 3 * 32), np.float32) * np.float32(1e-20)
    x32[:, 32:64] = 0
    x32[:5, 64:] = 0
    quantized = Quantized(format, w, 32, DType.FP32, double=False)
    x = reference.f32_to_bf16(x32)
    expected = transposed_product_bf16(x, quantized.decoded(DType.BF16))
    sizes = expected[:5] & 0x7FFF
    assert ((sizes > 0) & (sizes < 0x80)).sum() >= 20
    for x_rows in (1, 2, 9):
        assert same_bits(quantized.multiplied_transposed_bf16(x[:x_rows]), expected[:x_rows]), x_rows


def test_subnormal_products_of_bfloat16_are_there() -> None:
    """What the test above compares are not only zeros and NaN."""
    _, _, tiny, _ = a_wild_product_bf16(BlockFormat.INT8, 1e-20, "1e-19")
    sizes = tiny[:, :4] & 0x7FFF
    assert ((sizes > 0) & (sizes < 0x80)).sum() >= 18


# The largest |decoded - element| / absmax of the block: half the widest gap between values; e4m3 has 3 bits.
BOUNDS = {BlockFormat.NF4: 0.1519036, BlockFormat.INT8: 0.5 / 127, BlockFormat.FP8: 16 / 448}
ROUNDING = 2.0**-22


@pytest.mark.parametrize("format", list(BlockFormat))
def test_the_error_is_within_the_bound_of_the_format_and_reaches_it(format: BlockFormat) -> None:
    rng = np.random.default_rng(1)
    w = np.concatenate([rng.standard_normal((64, 1024)), np.linspace(-1, 1, 64 * 1024).reshape(64, 1024)])
    w[64:, ::64] = 1  # each block of the even ones has the absmax 1
    w = w.astype(np.float32)
    absmax = np.repeat(np.abs(w.reshape(-1, 64)).max(1), 64).reshape(w.shape)
    error = np.abs(Quantized(format, w, 64, DType.FP32, double=False).decoded(DType.FP32) - w) / absmax
    assert error.max() <= BOUNDS[format] + ROUNDING
    assert error[64:].max() >= 0.99 * BOUNDS[format]
    if format is BlockFormat.NF4:
        # The scales move by half the widest gap of the dynamic map, 0.9 / 64 / 2 of their group's largest distance.
        double = Quantized(format, w, 64, DType.FP32, double=True)
        spread = np.repeat(double.group_scales, SCALE_GROUP * 64).reshape(-1)[: w.size].reshape(w.shape)
        moved = np.abs(double.decoded(DType.FP32) - w) - absmax * np.float32(BOUNDS[format])
        assert moved.max() <= (spread * (0.45 / 64) + absmax * ROUNDING).max()
        assert (moved <= spread * (0.45 / 64) + absmax * ROUNDING).all()


@pytest.mark.parametrize("format", list(BlockFormat))
def test_a_block_that_is_not_finite_is_nan_and_no_other(isa: str, format: BlockFormat) -> None:
    w = weights((3, 192)).copy()
    w[0, 65], w[1, 3], w[2, 100] = math.inf, math.nan, -math.inf
    quantized = Quantized(format, w, 64, DType.FP32, double=False)
    decoded = quantized.decoded(DType.FP32)
    expected = np.zeros((3, 3), bool)
    expected[[0, 1, 2], [1, 0, 1]] = True
    assert np.array_equal(np.isnan(quantized.scales).reshape(3, 3), expected)
    assert np.array_equal(np.isnan(decoded), np.repeat(expected, 64, 1))
    assert set(decoded[np.isnan(decoded)].view(np.uint32).tolist()) == {0x7FC00000}
    y = quantized.multiplied(np.ones((1, 192), np.float32))
    assert y.view(np.uint32).tolist() == [[0x7FC00000] * 3]


def test_every_e4m3_code_decodes_to_its_value(isa: str) -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # NaN is never written
    padded = np.concatenate([codes, np.zeros(2, np.uint8)])
    scales, out = np.ones(4, np.float32), np.zeros(256, np.float32)
    matrix = QuantizedMatrix(BlockFormat.FP8, 4, 64, 64, codes=address(padded), scales=address(scales))
    block_kernels.dequantize(address(out), DType.FP32, matrix, (0, 4), (0, 64))
    assert same_bits(out[:254], E4M3[codes])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 3}, "format must be NF4, INT8 or FP8, got 3"),
        ({"block": 48}, "block must be a power of two from 32 to 4096, got 48"),
        ({"block": 8192}, "block must be a power of two from 32 to 4096, got 8192"),
        ({"numel": 100}, "numel must be a multiple of block, 0 or more, got 100"),
        ({"src_dtype": 3}, "src_dtype must be FP32, BF16 or FP16, got 3"),
        ({"scales": 2}, "scales must be the address of memory aligned to its element, got 2"),
        ({"codes": 0}, "codes must be the address of memory aligned to its element, got 0"),
        ({"src": 0}, "src must be the address of memory aligned to its element, got 0"),
    ],
)
def test_a_bad_argument_of_quantize_is_named(changed: dict[str, int], message: str) -> None:
    memory = np.zeros(64, np.float32)
    good: dict[str, Any] = dict.fromkeys(("codes", "scales", "src"), address(memory))
    good |= {"format": 0, "src_dtype": 0, "numel": 64, "block": 64}
    with pytest.raises(ValueError, match=f"^quantize: {message}$"):
        block_kernels.quantize(**(good | changed))


def test_a_bad_matrix_or_part_is_named() -> None:
    quantized = Quantized(BlockFormat.NF4, weights((3, 192)), 64, DType.FP32, double=False)
    out = np.zeros(1000, np.float32)
    for rows, columns, message in (
        ((4, 0), (0, 64), "first_row must be a row of the matrix, got 4"),
        ((1, 3), (0, 64), "rows must be a count of rows of the matrix, got 3"),
        ((0, 3), (32, 64), "first_column must be a multiple of block in the matrix, got 32"),
        ((0, 3), (64, 192), "columns must be a multiple of block in the matrix, got 192"),
    ):
        with pytest.raises(ValueError, match=f"^dequantize: {message}$"):
            block_kernels.dequantize(address(out), DType.FP32, quantized.matrix, rows, columns)
    with pytest.raises(
        ValueError, match=r"^QuantizedMatrix: columns must be a multiple of block, 0 or more, got 100"
    ):
        QuantizedMatrix(BlockFormat.NF4, 3, 100, 64, codes=address(out), scales=address(out))
    with pytest.raises(ValueError, match=r"^quantized_product: x must be the address"):
        block_kernels.quantized_product(address(out), 0, 1, quantized.matrix)
    with pytest.raises(ValueError, match=r"^quantized_product_bf16: y must be the address"):
        block_kernels.quantized_product_bf16(1, address(out), 1, quantized.matrix)
    with pytest.raises(ValueError, match=r"^quantized_product_bf16: rows must be a count"):
        block_kernels.quantized_product_bf16(address(out), address(out), -1, quantized.matrix)
    with pytest.raises(ValueError, match=r"^quantize_scales: offset must be the address"):
        block_kernels.quantize_scales(address(out), address(out), 0, address(out), 5)
