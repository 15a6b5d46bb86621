"""Typed functions over the C kernels of block formats: encoding, decoding, and products with a decoded matrix.

The callers' duties are those of the functions in kernels.py.
"""

from __future__ import annotations

import enum

from optim_cpu._kernels import ffi, lib
from optim_cpu.kernels import DType
from optim_cpu.refusals import refusal

MIN_BLOCK: int = lib.OPT_MIN_BLOCK
MAX_BLOCK: int = lib.OPT_MAX_BLOCK
"""Fewest and most elements of a block that has one scale; the number is a power of two."""

SCALE_GROUP: int = lib.OPT_SCALE_GROUP
"""Scales that have one scale of their own, in double quantisation."""


class BlockFormat(enum.IntEnum):
    """A format with one scale for a block of elements; ``csrc/kernels.h`` defines the codes."""

    NF4 = 0
    INT8 = 1
    FP8 = 2


class QuantizedMatrix:
    """A matrix of ``rows`` by ``columns`` elements in a block format. Borrows the memory of its arrays.

    Without ``group_scales`` there is a float32 scale for each block; with it, ``scales`` are codes of one byte, and
    ``offset`` is the address of one float32. Raises ValueError, which names the argument.
    """

    __slots__ = ("_matrix",)

    def __init__(
        self,
        format: BlockFormat,
        rows: int,
        columns: int,
        block: int,
        *,
        codes: int,
        scales: int,
        group_scales: int = 0,
        offset: int = 0,
    ) -> None:
        self._matrix = ffi.new("opt_matrix *")
        code = lib.opt_matrix_init(
            self._matrix, format, rows, columns, block, codes, scales, group_scales, offset
        )
        if code < 0:
            raise refusal("QuantizedMatrix", code, locals())


def quantize(
    format: BlockFormat, codes: int, scales: int, src: int, src_dtype: DType, numel: int, block: int
) -> None:
    """Encode ``numel`` elements of ``src``, a multiple of ``block``: their codes, and float32 scales.

    The scale of a block with an infinity or a NaN is NaN. Raises ValueError, which names the argument.
    """
    code = lib.opt_quantize(format, codes, scales, src, src_dtype, numel, block)
    if code < 0:
        raise refusal("quantize", code, locals())


def quantize_scales(codes: int, group_scales: int, offset: int, scales: int, count: int) -> None:
    """Encode the ``count`` float32 scales of a tensor once more: bytes, a float32 for each ``SCALE_GROUP``, an offset.

    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantize_scales(codes, group_scales, offset, scales, count)
    if code < 0:
        raise refusal("quantize_scales", code, locals())


def dequantize(
    dst: int, dst_dtype: DType, matrix: QuantizedMatrix, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    """Decode a part of ``matrix`` to ``dst``, row by row without gaps; rounded to nearest even.

    ``rows`` and ``columns`` are the first one and their number; those of columns are multiples of the block.
    Raises ValueError, which names the argument.
    """
    (first_row, row_count), (first_column, column_count) = rows, columns
    code = lib.opt_dequantize(
        dst, dst_dtype, matrix._matrix, first_row, row_count, first_column, column_count
    )
    if code < 0:
        named = {
            "first_row": first_row,
            "rows": row_count,
            "first_column": first_column,
            "columns": column_count,
        }
        raise refusal("dequantize", code, locals() | named)


def quantized_product(y: int, x: int, rows: int, matrix: QuantizedMatrix) -> None:
    """``y = x W^T`` for ``rows`` rows of float32, with the decoded ``matrix`` as W, which is not stored.

    The sums have one order, for each instruction set, thread count and number of rows.
    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantized_product(y, x, rows, matrix._matrix)
    if code < 0:
        raise refusal("quantized_product", code, locals())


def quantized_product_bf16(y: int, x: int, rows: int, matrix: QuantizedMatrix) -> None:
    """``y = x W^T`` for ``rows`` rows of bfloat16, with the decoded ``matrix``, rounded to bfloat16, as W.

    The sums are float32 and have one order, for each instruction set, thread count and number of rows.
    Raises ValueError, which names the argument.
    """
    code = lib.opt_quantized_product_bf16(y, x, rows, matrix._matrix)
    if code < 0:
        raise refusal("quantized_product_bf16", code, locals())


def quantized_transposed_product_bf16(y: int, x: int, rows: int, matrix: QuantizedMatrix) -> None:
    """``y = x W``, otherwise as ``quantized_product_bf16``: the rows of ``x`` are as long as columns of ``matrix``."""
    code = lib.opt_quantized_transposed_product_bf16(y, x, rows, matrix._matrix)
    if code < 0:
        raise refusal("quantized_transposed_product_bf16", code, locals())
