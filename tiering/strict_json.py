"""JSON from strangers: one object, without what parsers disagree about."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from typing import Any

short = reprlib.Repr()  # what strangers wrote may be as long as they like
short.maxstring, short.maxlist = 200, 8


class FormatError(ValueError):
    """What is wrong, in words that go into a sentence about the file."""


def parse(
    text: bytes,
    number: Callable[[str], object] | None = None,
    constant: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """The object that ``text`` is, in UTF-8. Raises FormatError for anything else, and for a key that comes twice.

    ``number`` reads every number, if given; ``constant`` reads NaN and the infinities. Without it these are an error,
    and so is a number that is too large for a float.
    """
    try:
        content = json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=number,
            parse_float=number or (finite if constant is None else float),
            parse_constant=constant or natural,
        )
    except RecursionError:
        raise FormatError("it is nested too deep") from None
    except FormatError:
        raise
    except ValueError as error:  # JSON and UTF-8 alike
        raise FormatError(f"it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise FormatError("it is not a JSON object")
    return content


def finite(text: str) -> float:
    """A number with a fraction or an exponent; json reads 1e999 as infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"{short.repr(text)} is too large for a number")
    return value


def natural(text: str) -> int:
    """A whole number that a file's size could be."""
    if not text.isdecimal() or len(text) > 18:  # 63 bits
        raise FormatError(f"{short.repr(text)} is not a whole number below 10**18")
    return int(text)


def strings(entries: dict[str, Any], key: str) -> dict[str, str]:
    """The strings by name under ``key``, which is taken out of ``entries``."""
    value = entries.pop(key, {})
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{key!r} does not map strings to strings")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise FormatError(f"{short.repr(name)} appears twice")
        name.encode()  # half of a surrogate pair, which JSON can escape, is no text
        made[name] = value
    return made
