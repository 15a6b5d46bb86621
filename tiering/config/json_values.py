"""Converts values of libraries to the types that JSON has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_DEPTH = 100
"""Levels of nesting; deeper values probably contain themselves."""


class DepthError(ValueError):
    """Values that are nested too deep."""


def values(data: Any, max_depth: int = MAX_DEPTH) -> Any:
    """``data`` with arrays, tensors and mappings of libraries converted to the types that JSON has.

    A value of any other type stays as it is. Raises DepthError.
    """
    if max_depth == 0:
        raise DepthError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, Mapping):
        return {str(name): values(value, max_depth - 1) for name, value in data.items()}
    if hasattr(data, "tolist"):
        return data.tolist()
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray):
        return [values(each, max_depth - 1) for each in data]
    return data
