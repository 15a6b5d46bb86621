"""Records in which every figure is one and the same number, so that a mixture of two of them shows."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


@cache
def numbered(kind: type[Record], number: int) -> Record:
    """A ``kind`` with something in each of its fields, those of the records in it included."""
    filled: Record = _filled(kind, number)
    return filled


def numbers(value: object) -> set[float]:
    """All numbers in a record: alone, and in names."""
    return set(_numbers(value))


def _filled(kind: Any, number: int) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{field.name: _filled(hints[field.name], number) for field in dataclasses.fields(kind)})
    inside = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Literal:
            return inside[number % len(inside)]
        case origin if origin in (Union, UnionType):
            return _filled(next(argument for argument in inside if argument is not NoneType), number)
        case origin if origin is list:
            return [_filled(inside[0], number) for _ in range(1 + number % 5)]
        case origin if origin is dict:
            return {f"{'x' * place} {number}": _filled(inside[1], number) for place in range(1 + number % 3)}
        case origin if origin is bool:
            return bool(number % 2)
        case origin if origin in (int, float):
            return origin(number)
    return f"some {number}"


def _numbers(value: object) -> Iterator[float]:
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, dict):
        yield from _numbers([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+", value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
