"""Strict parser of JSON from untrusted files: one object, without duplicate keys, NaN or other ambiguities."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from typing import Any

# For error messages: values in an untrusted file may be very long.
short = reprlib.Repr()
short.maxstring, short.maxlist = 200, 8


class FormatError(ValueError):
    """The content is invalid. The message is a clause about the file: "it is nested too deeply"."""


def parse(
    text: bytes,
    number: Callable[[str], object] | None = None,
    constant: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Parse ``text`` (UTF-8) as a JSON object. Raises FormatError for other content, and for duplicate keys.

    ``number`` converts every number, if given; ``constant`` converts NaN and the infinities. Without ``constant`` these
    are errors, and so is a number that is too large for a float.
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
        raise FormatError("it is nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:
        # From the JSON parser or from the UTF-8 decoder.
        raise FormatError(f"it is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise FormatError("it is not a JSON object")
    return content


def finite(text: str) -> float:
    """A finite float. json converts 1e999 to infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"{short.repr(text)} is too large for a number")
    return value


def natural(text: str) -> int:
    """A non-negative integer that could be a file size."""
    # 18 digits fit 63 bits.
    if not text.isdecimal() or len(text) > 18:
        raise FormatError(f"{short.repr(text)} is not a whole number below 10**18")
    return int(text)


def strings(entries: dict[str, Any], key: str) -> dict[str, str]:
    """Remove ``key`` from ``entries`` and return its value, a map of strings to strings."""
    value = entries.pop(key, {})
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{key!r} does not map strings to strings")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise FormatError(f"{short.repr(name)} appears twice")
        # Raises ValueError for half of a surrogate pair, which JSON can escape.
        name.encode()
        entries[name] = value
    return entries
