"""The first values of parameters: from memory, from the operations that were recorded when the model was built
(zero_init.py), or from a file (weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zero3.building.zero_init import Recipe
from zero3.params.layout import Piece, in_elements_of
from zero3.params.param_group import ParamGroup


class Source(Protocol):
    """A source of the values of one parameter."""

    def read(self, first: int, numel: int) -> Tensor:
        """The elements [first, first + numel), flat, on the CPU; valid until the next ``read``."""

    def release(self) -> None:
        """Free the memory that the source uses to read; it may be read again."""


class InMemory:
    """A parameter whose values are in memory."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = param
        self._flat: Tensor | None = None

    def read(self, first: int, numel: int) -> Tensor:
        if self._flat is None:
            # A view, unless the elements are not contiguous.
            self._flat = self._param.detach().flatten()
        return self._flat[first : first + numel].cpu()

    def release(self) -> None:
        self._flat = None


class Replayed:
    """A parameter that was built without memory, whose operations are run again."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._flat: Tensor | None = None

    def read(self, first: int, numel: int) -> Tensor:
        if self._flat is None:
            self._flat = self._recipe.make().flatten()
        return self._flat[first : first + numel]

    def release(self) -> None:
        self._flat = None


class AsBytes:
    """The bytes of a parameter that keeps its dtype, from ``source``, as elements of a flat tensor of ``dtype``."""

    def __init__(self, source: Source, piece: Piece, dtype: torch.dtype) -> None:
        self._source = source
        self._piece = piece
        self._dtype = dtype

    def read(self, first: int, numel: int) -> Tensor:
        own = self._piece.own_elements(first, numel, self._dtype.itemsize)
        return in_elements_of(self._dtype, self._source.read(own.start, len(own)))

    def release(self) -> None:
        self._source.release()


@dataclass(frozen=True)
class FirstValues:
    """The sources of a parameter's values and of each of its moments; None for a moment with the usual first value."""

    values: Source
    moments: tuple[Source | None, ...] = ()


def for_home(first_values: FirstValues, piece: Piece, group: ParamGroup) -> FirstValues:
    """``first_values`` with elements that the flat tensor of ``group`` takes."""
    if piece.own_dtype is None:
        return first_values
    return FirstValues(AsBytes(first_values.values, piece, group.dtype))
