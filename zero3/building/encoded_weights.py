"""Encodes stored weights for quantised layers while they are read, a range at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from optim_cpu.formats import QuantizedFormat
from optim_cpu.quantization import decode_scales, encode_blocks, encode_scales
from tiering.errors import WeightsError
from tiering.weights.files import StoredTensor
from zero3.building.quantized_experts import SCALES, QuantizedExperts
from zero3.building.quantized_linear import QuantizedLinear

PASS = 1 << 20
"""Elements that are encoded at once when a pass over a weight is needed for its scales alone."""


@dataclass(frozen=True)
class EncodedTensor:
    """A weight in ``form``: a matrix (rows, columns), or a matrix for each expert, (experts, rows, columns)."""

    codes: nn.Parameter
    scales: nn.Parameter
    form: QuantizedFormat
    shape: tuple[int, ...]

    @property
    def experts(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    def decoded_scales(self, stored: Tensor) -> Tensor:
        """All scales, flat and in float32, from their bytes ``stored``: those of each expert for itself, padded."""
        numel = math.prod(self.shape) // self.experts
        nbytes, count = self.form.scale_bytes(numel), numel // self.form.group_size
        rows = stored.reshape(self.experts, -1)
        return torch.cat([decode_scales(self.form, own[:nbytes], count) for own in rows])


def encoded_tensors(model: nn.Module) -> Iterator[EncodedTensor]:
    """The weights of the quantised layers and experts of ``model``."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            own_shape = module.out_features, module.in_features
            yield EncodedTensor(module.weight, module.weight_scales, module.form, own_shape)
        elif isinstance(module, QuantizedExperts):
            for name, shape in module.matrices.items():
                codes, scales = module._parameters[name], module._parameters[name + SCALES]
                assert codes is not None and scales is not None
                yield EncodedTensor(codes, scales, module.form, shape)


class StoredValues(Protocol):
    """The stored values of a weight, flat: see ``weights.FileSource``."""

    parts: tuple[StoredTensor, ...]
    dtype: torch.dtype

    def read(self, first: int, numel: int) -> Tensor: ...

    def release(self) -> None: ...


class _Scales:
    """The float32 scales of the weight that is being encoded: one at a time, because a fill goes from one to the next.

    All scales of a weight must be known before they are quantised once more. They come from its first to its last, as
    its codes are read; what is missing then is read again.
    """

    def __init__(self) -> None:
        self._owner: _EncodedWeight | None = None
        self._scales = torch.empty(0)
        self._known = 0

    def put(self, owner: _EncodedWeight, first: int, scales: Tensor) -> None:
        """Keep ``scales`` from number ``first`` on, if all before them are known."""
        if self._owner is not owner:
            self._owner, self._known = owner, 0
            self._scales = torch.empty(owner.scale_count, device="cpu")
        end = first + scales.numel()
        if first <= self._known < end:
            self._scales[first:end] = scales
            self._known = end

    def known(self, owner: _EncodedWeight) -> int:
        return self._known if self._owner is owner else 0

    def take(self, owner: _EncodedWeight) -> Tensor:
        """All scales of ``owner``, which are then forgotten."""
        assert self._owner is owner and self._known == owner.scale_count
        scales, self._scales, self._owner = self._scales, torch.empty(0), None
        return scales


class _EncodedWeight:
    """One weight, from the floats of ``stored``."""

    def __init__(self, name: str, tensor: EncodedTensor, stored: StoredValues, kept: _Scales) -> None:
        self.name = name
        self.tensor = tensor
        self.form = tensor.form
        self.stored = stored
        self.kept = kept
        self.numel = math.prod(tensor.shape)
        self.scale_count = self.numel // tensor.form.group_size

    def encode(self, first: int, end: int) -> Tensor:
        """The codes of elements [first, end), which are whole blocks; keeps their scales."""
        block = self.form.group_size
        values = self.stored.read(first, end - first)
        try:
            codes, scales = encode_blocks(
                self.form, values.float() if values.dtype is torch.float64 else values
            )
        except ValueError as error:
            raise WeightsError(
                f"{self.name!r}: {error}", "download the files again, or use the original model"
            ) from error
        self.kept.put(self, first // block, scales)
        return codes

    def encode_rest(self) -> None:
        block = self.form.group_size
        step = max(PASS // block, 1) * block
        for first in range(self.kept.known(self) * block, self.numel, step):
            self.encode(first, min(first + step, self.numel))


class EncodedCodes:
    """The codes of a weight, as a source."""

    def __init__(self, weight: _EncodedWeight) -> None:
        self._weight = weight
        self.dtype = weight.form.dtype
        self.parts = weight.stored.parts

    def read(self, first: int, numel: int) -> Tensor:
        form = self._weight.form
        block = form.group_size
        start = first * form.code_elements // block * block
        end = math.ceil((first + numel) * form.code_elements / block) * block
        skipped = first - start // form.code_elements
        return self._weight.encode(start, end)[skipped : skipped + numel]

    def release(self) -> None:
        self._weight.stored.release()


class EncodedScales:
    """The bytes of the scales of a weight, as a source."""

    dtype = torch.uint8
    parts: tuple[StoredTensor, ...] = ()

    def __init__(self, weight: _EncodedWeight) -> None:
        self._weight = weight
        self._bytes: Tensor | None = None

    def read(self, first: int, numel: int) -> Tensor:
        if self._bytes is None:
            self._weight.encode_rest()
            self._bytes = self._encoded(self._weight.kept.take(self._weight))
        return self._bytes[first : first + numel]

    def _encoded(self, scales: Tensor) -> Tensor:
        """The bytes of all ``scales``: those of each expert for itself, padded."""
        tensor = self._weight.tensor
        encoded = torch.zeros(tensor.scales.shape, dtype=torch.uint8, device="cpu").view(tensor.experts, -1)
        for expert, own in enumerate(scales.view(tensor.experts, -1)):
            own_bytes = encode_scales(tensor.form, own)
            encoded[expert, : own_bytes.numel()] = own_bytes
        return encoded.view(-1)

    def release(self) -> None:
        self._bytes = None
        self._weight.stored.release()


def encoded_sources(
    tensors: Iterable[EncodedTensor], stored: Mapping[nn.Parameter, StoredValues]
) -> dict[nn.Parameter, StoredValues]:
    """Sources of codes and scales of ``tensors`` from ``stored``, the floats for their codes."""
    sources: dict[nn.Parameter, StoredValues] = {}
    kept = _Scales()
    for tensor in tensors:
        values = stored[tensor.codes]
        weight = _EncodedWeight(values.parts[0].name, tensor, values, kept)
        sources[tensor.codes] = EncodedCodes(weight)
        sources[tensor.scales] = EncodedScales(weight)
    return sources
