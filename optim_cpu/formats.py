"""Formats: how the elements of a tensor are stored, each declared once. Imports torch only to encode and decode.

Optimizers store state in ``FP32``, ``BF16`` and ``SPLIT``, frozen weights are stored in block formats: see
``quantized``. The planner reads the bytes per element. ``csrc/kernels.h`` defines the codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optim_cpu import kernels
from optim_cpu.block_kernels import MAX_BLOCK, MIN_BLOCK, SCALE_GROUP, BlockFormat
from optim_cpu.kernels import StateFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True)
class Array:
    """One of the arrays of an encoded tensor: one item of ``dtype`` for each ``elements`` elements (0: for all)."""

    name: str
    dtype: str
    elements: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an item."""
        return _ITEMSIZES[self.dtype]

    def items(self, numel: int) -> int:
        """The number of items for a tensor of ``numel`` elements."""
        return math.ceil(numel / self.elements) if self.elements else 1


@dataclass(frozen=True)
class Format:
    """A way to store a tensor of float32 values in one or more arrays.

    ``group_size`` elements are encoded together. ``error`` is the largest difference that a round trip makes, as a
    share of the largest magnitude of a group, besides float32's own rounding; 0 for an exact format. Scales that are
    quantised once more err in addition by up to ``SCALE_ERROR`` of the largest distance of a scale from their mean.
    """

    name: str
    arrays: tuple[Array, ...]
    group_size: int = 1
    error: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether decoding restores every number bit for bit."""
        return self.error == 0

    @property
    def bytes_per_element(self) -> float:
        """Bytes of all arrays, per element of a large tensor."""
        return sum(array.itemsize / array.elements for array in self.arrays if array.elements)

    def nbytes(self, numel: int) -> int:
        """Bytes of all arrays of a tensor of ``numel`` elements."""
        return sum(array.items(numel) * array.itemsize for array in self.arrays)

    def encode(self, values: Tensor) -> tuple[Tensor, ...]:
        """The arrays that store the floating-point tensor ``values`` on the CPU.

        Raises TypeError or ValueError for a tensor that the format cannot store.
        """
        if len(self.arrays) > 1:
            return split(values.float())
        import torch

        out = torch.empty_like(values, dtype=self.dtype, memory_format=torch.contiguous_format)
        round_parameters(values, out)
        return (out,)

    def decode(self, arrays: Sequence[Tensor]) -> Tensor:
        """The float32 values of ``arrays``, which ``encode`` returned."""
        return join(*arrays) if len(arrays) > 1 else arrays[0].float()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first array."""
        import torch

        dtype: torch.dtype = getattr(torch, self.arrays[0].dtype)
        return dtype


@dataclass(frozen=True)
class QuantizedFormat(Format):
    """A block format: a code for each element, and a scale for each ``group_size`` elements of a row.

    ``encode`` takes a tensor whose last dimension is a multiple of ``group_size``, and returns two tensors: the codes,
    of its shape but for the last dimension, and the bytes of all scales, flat. Codes are int8 in "int8" and uint8 in
    other formats, as scales are. No cast of a model to another dtype changes them, and the shapes and dtypes of codes
    and scales tell the formats apart, so that stored tensors fit one format only.
    """

    code: BlockFormat = BlockFormat.NF4

    def __str__(self) -> str:
        twice = ", double quantised," if self.double_quantised else ""
        return f"{self.name} with blocks of {self.group_size}{twice}"

    @property
    def double_quantised(self) -> bool:
        """Whether the scales are quantised once more."""
        return len(self.arrays) > 2

    @property
    def code_elements(self) -> int:
        """Elements in a byte of codes."""
        return self.arrays[0].elements

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of a tensor of ``numel`` elements."""
        return self.nbytes(numel) - numel // self.code_elements

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        from optim_cpu import quantization

        codes, scales = quantization.encode_blocks(self, values)
        return codes, quantization.encode_scales(self, scales)

    def decode(self, arrays: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The values of ``arrays`` in ``dtype`` (None: float32), on their device."""
        from optim_cpu import quantization

        return quantization.decode(self, *arrays, dtype=dtype)


FP32 = Format("fp32", (Array("values", "float32"),))
BF16 = Format("bf16", (Array("values", "bfloat16"),), error=2**-8)
"""Rounded to the nearest; stochastic rounding errs by twice as much at most."""

SPLIT = Format("split", (Array("param", "bfloat16"), Array("remainder", "int16")))
"""A bfloat16 parameter, and the rest of its float32 master."""

STATE_FORMATS: Mapping[StateFormat, Format] = {
    StateFormat.FP32: FP32,
    StateFormat.BF16: BF16,
    StateFormat.BF16_STOCHASTIC: BF16,
}
"""The format in which the kernels store each array of an optimizer's state."""

# Half the widest gap between two values, as a share of the largest one; e4m3 has 4 bits from 256 to 448.
_ERRORS = {"nf4": (1 - 0.6961928009986877) / 2, "int8": 0.5 / 127, "fp8": 16 / 448}

SCALE_ERROR = 0.9 / 64 / 2
"""Half the widest gap between two values of the dynamic map (see ``Format``)."""

QUANTIZED = ("nf4", "int8", "fp8")
"""The names of the block formats."""


def quantized(name: str, *, double_quant: bool = True, block_size: int = 64) -> QuantizedFormat:
    """The block format ``name``: "nf4", whose scales are quantised once more if ``double_quant``, "int8" or "fp8".

    Raises ValueError for another name, or a block size that is not a power of two from 32 to 4096.
    """
    if name not in QUANTIZED:
        raise ValueError(
            f"unknown quantised format {name!r}; choose one of {', '.join(map(repr, QUANTIZED))}"
        )
    smallest, largest = MIN_BLOCK, MAX_BLOCK
    is_whole = isinstance(block_size, int) and not isinstance(block_size, bool)
    if not is_whole or not smallest <= block_size <= largest or block_size & (block_size - 1):
        raise ValueError(
            f"block_size is {block_size!r}; it must be a power of two from {smallest} to {largest}, as an int"
        )
    scales: tuple[Array, ...] = (Array("scales", "float32", block_size),)
    if name == "nf4" and double_quant:
        scales = (
            Array("offset", "float32", 0),
            Array("group scales", "float32", block_size * SCALE_GROUP),
            Array("scales", "uint8", block_size),
        )
    codes = Array("codes", "int8" if name == "int8" else "uint8", 2 if name == "nf4" else 1)
    return QuantizedFormat(name, (codes, *scales), block_size, _ERRORS[name], BlockFormat[name.upper()])


def round_parameters(master: Tensor, out: Tensor) -> None:
    """Set ``out`` to ``master`` rounded as the optimizers do: bfloat16 ties away from zero, other dtypes as torch.

    Both tensors have the same shape, are contiguous and on the CPU. With ties to even, a bfloat16 and 16 more bits
    could not represent every float32 (see ``csrc/kernels.h``). Except for ties, torch rounds to the same bfloat16.
    """
    import torch

    if out.dtype is not torch.bfloat16 or master.dtype is torch.bfloat16:
        out.copy_(master)
        return
    wide = master.float().contiguous()
    _check(wide, out)
    kernels.split(out.data_ptr(), 0, wide.data_ptr(), wide.numel())


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 parameter and the int16 remainder of a float32 ``master``, of its shape.

    ``join`` restores the master bit for bit, except that every NaN becomes the quiet NaN.
    """
    import torch

    wide = master.detach().contiguous()
    param = torch.empty_like(wide, dtype=torch.bfloat16)
    remainder = torch.empty_like(wide, dtype=torch.int16)
    _check(wide, param)
    kernels.split(param.data_ptr(), remainder.data_ptr(), wide.data_ptr(), wide.numel())
    return param, remainder


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master from the results of ``split``. Raises TypeError or ValueError for other tensors."""
    import torch

    param, remainder = param.detach().contiguous(), remainder.contiguous()
    if param.dtype is not torch.bfloat16 or remainder.dtype is not torch.int16:
        raise TypeError(
            f"join: param is {param.dtype} and remainder {remainder.dtype}; they must be bfloat16 and int16"
        )
    master = torch.empty_like(param, dtype=torch.float32)
    _check(master, param)
    _check(master, remainder)
    kernels.join(master.data_ptr(), param.data_ptr(), remainder.data_ptr(), master.numel())
    return master


def _check(master: Tensor, half: Tensor) -> None:
    import torch

    if master.dtype is not torch.float32:
        raise TypeError(f"the master is {master.dtype}; it must be float32")
    for tensor in (master, half):
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor is on {tensor.device}; it must be on the CPU")
    if master.shape != half.shape or not half.is_contiguous():
        raise ValueError(
            f"shapes {tuple(master.shape)} and {tuple(half.shape)} must be equal, and both contiguous"
        )
