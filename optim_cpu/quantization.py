"""Block formats on tensors: encode on the CPU, decode and multiply on any device.

A decoded weight has the same bits on each device: on the CPU the kernels compute it, elsewhere torch operations that
round at the same places, or the kernels of a subclass of ``Weight``.
"""

from __future__ import annotations

import functools
import mmap
import threading
from typing import Protocol

import torch
from torch import Tensor

from optim_cpu import block_kernels, kernels
from optim_cpu.block_kernels import SCALE_GROUP, BlockFormat, QuantizedMatrix
from optim_cpu.dtypes import DTYPES

FEW_ROWS = {torch.float32: 16, torch.bfloat16: 64, torch.float16: 16}
"""Rows of inputs up to which the kernels compute a product, in bfloat16 also the transposed one; torch multiplies more
with a decoded weight.

Measured on a Zen 4 with AVX512-BF16.
"""

LARGEST = 2.0**127
"""The largest magnitude that is encoded: a scale is rounded, and a larger product with a code may be infinite."""

_LARGEST_CODES = {BlockFormat.NF4: 1.0, BlockFormat.INT8: 127.0, BlockFormat.FP8: 448.0}

CHUNK = 1 << 23
"""Elements of a weight that are decoded at once, which bounds the buffer: 16 MiB in bf16.

With fewer, the kernels' threads and torch's take turns more often, and torch's spin for a while after each product.
"""


class BlockLayout(Protocol):
    """What is read here of a block format, which is a ``formats.QuantizedFormat``."""

    @property
    def code(self) -> BlockFormat: ...

    @property
    def group_size(self) -> int: ...

    @property
    def code_elements(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def double_quantised(self) -> bool: ...

    def scale_bytes(self, numel: int) -> int: ...


def encode_blocks(form: BlockLayout, values: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of ``values``, (..., columns), and its float32 scales, (..., columns / block), on the CPU.

    Raises TypeError for a dtype that is not float32, bfloat16 or float16, and ValueError for a number of columns that
    is no multiple of the block, and for an element that is not finite or larger than ``LARGEST``.
    """
    if values.dtype not in DTYPES:
        raise TypeError(f"the values are {values.dtype}; they must be float32, bfloat16 or float16")
    block, columns = form.group_size, values.shape[-1]
    if columns % block:
        raise ValueError(f"the last dimension is {columns}; it must be a multiple of the block size, {block}")
    source = values.detach().cpu().contiguous()
    codes = torch.empty((*values.shape[:-1], columns // form.code_elements), dtype=form.dtype, device="cpu")
    scales = torch.empty((*values.shape[:-1], columns // block), device="cpu")
    block_kernels.quantize(
        form.code,
        codes.data_ptr(),
        scales.data_ptr(),
        source.data_ptr(),
        DTYPES[source.dtype],
        source.numel(),
        block,
    )
    if not scales.isfinite().all():
        raise ValueError("an element is infinite or NaN, which a block format cannot store")
    limit = LARGEST / _LARGEST_CODES[form.code]
    if (scales > limit).any():
        raise ValueError(
            f"the magnitude of an element is above {LARGEST:.3g}, and rounding in a block format could make it infinite"
        )
    return codes, scales


def encode_scales(form: BlockLayout, scales: Tensor) -> Tensor:
    """The bytes of all ``scales`` of a tensor, flat: in float32, or offset, group scales and codes."""
    flat = scales.contiguous().view(-1)
    if not form.double_quantised:
        return flat.view(torch.uint8)
    count = flat.numel()
    encoded = torch.empty(form.scale_bytes(count * form.group_size), dtype=torch.uint8, device="cpu")
    offset, group_scales, codes = _parts(encoded, count)
    block_kernels.quantize_scales(
        codes.data_ptr(), group_scales.data_ptr(), offset.data_ptr(), flat.data_ptr(), count
    )
    return encoded


def decode_scales(form: BlockLayout, scales: Tensor, count: int) -> Tensor:
    """The ``count`` float32 scales whose bytes are ``scales``, with the bits of those in the kernels."""
    if scales.data_ptr() % 4:
        # A tensor's bytes may begin anywhere in a group of parameters.
        scales = scales.clone()
    if not form.double_quantised:
        return scales.view(torch.float32)
    offset, group_scales, codes = _parts(scales, count)
    book = table(dynamic_map(), codes.device)
    groups = torch.arange(count, device=codes.device) // SCALE_GROUP
    return book[codes.int()] * group_scales[groups] + offset


def decode_blocks(form: BlockLayout, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, flat, of whole blocks on the CPU, from their codes, flat, and float32 ``scales``, one per block."""
    block = form.group_size
    blocks = codes.numel() * form.code_elements // block
    values = torch.empty(blocks * block, dtype=dtype if dtype in DTYPES else torch.float32, device="cpu")
    if blocks:
        addresses = {"codes": codes.data_ptr(), "scales": scales.data_ptr()}
        matrix = QuantizedMatrix(form.code, blocks, block, block, **addresses)
        block_kernels.dequantize(values.data_ptr(), DTYPES[values.dtype], matrix, (0, blocks), (0, block))
    return values.to(dtype)


def decode(form: BlockLayout, codes: Tensor, scales: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """All values of an encoded tensor in ``dtype`` (None: float32), on the device of its codes."""
    shape = (*codes.shape[:-1], codes.shape[-1] * form.code_elements)
    weight = Weight(form, codes, scales)
    return weight.decoded(dtype or torch.float32).view(shape)


class Weight:
    """An encoded matrix, or a stack of them, whose rows are then one after the other. Borrows its tensors.

    ``codes`` has the shape (..., rows, bytes) and the dtype of ``form``, ``scales`` is flat and of uint8. Both are
    contiguous, on one device.
    """

    def __init__(self, form: BlockLayout, codes: Tensor, scales: Tensor) -> None:
        self._form = form
        self._codes = codes
        # A tensor's bytes may begin anywhere in a group of parameters.
        self._scales = scales if scales.data_ptr() % 4 == 0 else scales.clone()
        self.columns = codes.shape[-1] * form.code_elements
        self.rows = codes.numel() // max(codes.shape[-1], 1)

    def decoded(
        self,
        dtype: torch.dtype,
        rows: slice = slice(None),
        columns: slice = slice(None),
        out: Tensor | None = None,
    ) -> Tensor:
        """The values of a part in ``dtype``, rounded to nearest even. ``columns`` begin and end at blocks.

        ``out`` receives them if it is given: flat memory of the dtype with room for them, on the CPU.
        """
        first, end, _ = rows.indices(self.rows)
        left, right, _ = columns.indices(self.columns)
        shape = (end - first, right - left)
        if self._codes.device.type != "cpu":
            return self._decoded_elsewhere(dtype, (first, end), (left, right))
        if dtype not in DTYPES:
            return self.decoded(torch.float32, rows, columns).to(dtype)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device="cpu")
        into = out.view(-1)[: shape[0] * shape[1]].view(shape)
        block_kernels.dequantize(
            into.data_ptr(), DTYPES[dtype], self._matrix(), (first, shape[0]), (left, shape[1])
        )
        return into

    def product(self, x: Tensor) -> Tensor:
        """``x W^T``: (inputs, columns) to (inputs, rows), in the dtype of ``x``. Shape and dtype select the way."""
        if x.device.type != "cpu" or x.dtype not in DTYPES:
            return x @ self.decoded(x.dtype).t()
        if x.shape[0] <= FEW_ROWS[x.dtype]:
            if x.dtype is torch.bfloat16:
                y = torch.empty((x.shape[0], self.rows), dtype=x.dtype, device="cpu")
                halves = x.contiguous()
                block_kernels.quantized_product_bf16(
                    y.data_ptr(), halves.data_ptr(), x.shape[0], self._matrix()
                )
                return y
            wide = _converted(x.contiguous(), torch.float32)
            y = torch.empty((x.shape[0], self.rows), device="cpu")
            block_kernels.quantized_product(y.data_ptr(), wide.data_ptr(), x.shape[0], self._matrix())
            return _converted(y, x.dtype)
        if x.dtype is torch.float16:
            return self.product(x.float()).half()
        y = torch.empty((x.shape[0], self.rows), dtype=x.dtype, device="cpu")
        step = max(CHUNK // max(self.columns, 1), 64)
        room = _room_for(min(step, self.rows) * self.columns, x.dtype)
        for row in range(0, self.rows, step):
            part = slice(row, row + step)
            torch.mm(x, self.decoded(x.dtype, rows=part, out=room).t(), out=y[:, part])
        return y

    def transposed_product(self, y: Tensor) -> Tensor:
        """``y W``: (inputs, rows) to (inputs, columns), in the dtype of ``y``. Shape and dtype select the way."""
        if y.device.type != "cpu" or y.dtype not in DTYPES:
            return y @ self.decoded(y.dtype)
        if y.dtype is torch.bfloat16 and y.shape[0] <= FEW_ROWS[y.dtype]:
            x = torch.empty((y.shape[0], self.columns), dtype=y.dtype, device="cpu")
            halves = y.contiguous()
            block_kernels.quantized_transposed_product_bf16(
                x.data_ptr(), halves.data_ptr(), y.shape[0], self._matrix()
            )
            return x
        if y.dtype is torch.float16:
            # torch multiplies float16 on a CPU up to a hundred times slower than float32.
            return self.transposed_product(y.float()).half()
        x = torch.empty((y.shape[0], self.columns), dtype=y.dtype, device="cpu")
        block = self._form.group_size
        step = max(CHUNK // max(self.rows, 1) // block, 1) * block
        room = _room_for(self.rows * min(step, self.columns), y.dtype)
        for column in range(0, self.columns, step):
            part = slice(column, column + step)
            torch.mm(y, self.decoded(y.dtype, columns=part, out=room), out=x[:, part])
        return x

    def _matrix(self) -> QuantizedMatrix:
        codes, scales = self._codes.data_ptr(), self._scales.data_ptr()
        form, group_scales, offset = self._form, 0, 0
        if form.double_quantised:
            offset, group_scales, scales = (part.data_ptr() for part in self._scale_parts())
        return QuantizedMatrix(
            form.code,
            self.rows,
            self.columns,
            form.group_size,
            codes=codes,
            scales=scales,
            group_scales=group_scales,
            offset=offset,
        )

    def _scale_parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Offset, group scales and codes of scales that are quantised once more."""
        return _parts(self._scales, self.rows * self.columns // self._form.group_size)

    def _decoded_elsewhere(
        self, dtype: torch.dtype, rows: tuple[int, int], columns: tuple[int, int]
    ) -> Tensor:
        """The part from the first of ``rows`` and ``columns`` to the second, on a device other than the CPU."""
        return self._by_torch(*rows, *columns).to(dtype)

    def _by_torch(self, first: int, end: int, left: int, right: int) -> Tensor:
        form, per_row = self._form, self.columns // self._form.group_size
        at = slice(left // form.code_elements, right // form.code_elements)
        codes = self._codes.view(self.rows, -1)[first:end, at]
        scales = decode_scales(form, self._scales, self.rows * per_row).view(self.rows, per_row)
        scales = scales[first:end, left // form.group_size : right // form.group_size]
        values = _values(form.code, codes.reshape(*scales.shape, form.group_size // form.code_elements))
        # Infinity times 0 alone would be NaN.
        finite = torch.where(scales.isfinite(), scales, torch.nan)
        return (values * finite.unsqueeze(-1)).view(end - first, right - left)


_rooms = threading.local()


def _room_for(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for ``numel`` decoded elements, flat, until the next call in the same thread.

    It stays with the thread, and is not of the heap: buffers of this size that are freed there leave holes, which no
    other tensor fills.
    """
    nbytes = numel * dtype.itemsize
    room: Tensor | None = getattr(_rooms, "room", None)
    if room is None or room.numel() < nbytes:
        # Private: a forked child has its own. Pages that nobody uses take no memory.
        pages = mmap.mmap(
            -1, max(nbytes, CHUNK * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        room = _rooms.room = torch.frombuffer(pages, dtype=torch.uint8)
    return room[:nbytes].view(dtype)


def _parts(scales: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offset, group scales and codes of ``count`` scales in their bytes."""
    groups = -(-count // SCALE_GROUP)
    floats = scales[: 4 + 4 * groups].view(torch.float32)
    return floats[:1], floats[1:], scales[4 + 4 * groups :]


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, by the kernels: torch's threads would spin for a while, and take CPUs from theirs."""
    if x.dtype is dtype:
        return x
    out = torch.empty_like(x, dtype=dtype)
    kernels.accumulate(
        out.data_ptr(), DTYPES[dtype], x.data_ptr(), DTYPES[x.dtype], x.numel(), overwrite=True
    )
    return out


def _values(code: BlockFormat, codes: Tensor) -> Tensor:
    """The float32 value of each code of blocks, (..., block)."""
    if code is BlockFormat.INT8:
        return codes.view(torch.int8).float()
    if code is BlockFormat.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    halves = codes.unflatten(-1, (-1, 16))
    book = table(NF4_VALUES, codes.device)
    indices = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)
    return book[indices.int()]


# Several values in a line: one in each would hide that it is a table.
# fmt: off
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
"""The codebook of QLoRA's NF4 (Dettmers et al. 2023)."""


@functools.cache
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """``values`` on the device, where they stay: a copy to a GPU waits for it."""
    return torch.tensor(values, device=device)


@functools.cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the codes of scales, as in ``csrc/kernels.h``."""
    above = []
    for k in range(1, 128):
        n = 1 << (k.bit_length() - 1)
        above.append((2 * n + 18 * (k - n) + 9) / (20 * n * 10 ** (7 - n.bit_length())))
    return (*(-value for value in reversed(above)), 0.0, *above, 1.0)
