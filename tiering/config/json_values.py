"""What libraries have in place of the values that JSON has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEEPEST = 100
"""Sections in sections: beyond that, something holds itself."""


class DepthError(ValueError):
    """Values that are nested too deep."""


def values(given: Any, deepest: int = DEEPEST) -> Any:
    """``given`` in the types that JSON has, where libraries have others: arrays, tensors, mappings of their own.

    What has no such type stays as it is. Raises DepthError.
    """
    if deepest == 0:
        raise DepthError(f"nested deeper than {DEEPEST} levels")
    if isinstance(given, Mapping):
        return {str(name): values(value, deepest - 1) for name, value in given.items()}
    if hasattr(given, "tolist"):
        return given.tolist()
    if isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray):
        return [values(each, deepest - 1) for each in given]
    return given
