"""What the sections of the configuration share: sizes in bytes, numbers, and the strictness of a section.

Sizes are bytes, written ``4K``, ``1M``, ``1GiB`` (1024-based) or ``1GB`` (10^9); fields that count elements
say so. What is planned but not done yet is refused with the words "not supported in this version".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction
from typing import Annotated, SupportsIndex

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

ALIGNMENT = 4096
"""Bytes to which O_DIRECT wants address, offset and length aligned."""

_UNITS = {"": 1, "B": 1, "kB": 1000}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SPELLINGS = {unit.lower(): unit for unit in _UNITS}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(size: float | str) -> int:
    """Bytes in ``size``: a whole number, or text such as ``4K``, ``1.5GiB`` (1024-based) or ``1GB`` (10^9).

    A fraction of a byte is rounded down. Raises ``ValueError`` for negative sizes and unknown units.
    """
    if isinstance(size, str):
        number, unit = _split_size(size)
        value = math.floor(Fraction(number) * _UNITS[unit])
    else:
        value = whole_number(size)
    if value < 0:
        raise ValueError(f"a size cannot be negative: {size!r}")
    return value


def _split_size(text: str) -> tuple[str, str]:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a size is a number with a unit such as '4K', '1GiB' or '1GB', not {text!r}")
    number, unit = match.groups()
    if unit in _UNITS:
        return number, unit
    similar = get_close_matches(unit.lower(), _SPELLINGS, n=1)
    hint = (
        f"did you mean {_SPELLINGS[similar[0]]!r}?" if similar else "use K, M, G, T, KiB ... TiB or KB ... TB"
    )
    raise ValueError(f"unknown unit {unit!r} in size {text!r}; {hint}")


def format_size(size: float) -> str:
    """``size`` bytes as people read them, 1024-based: ``1.50 GiB``."""
    scaled, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(scaled) >= 1024 and len(units) > 1:
        scaled /= 1024
        units.pop(0)
    return f"{scaled:.0f} {units[0]}" if units[0] == "B" else f"{scaled:.2f} {units[0]}"


def legible(text: str) -> str:
    """``text`` in one line: the name of a directory or a process may hold what moves the cursor, or worse."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def format_need(size: int) -> str:
    """As ``format_size``, rounded up: a budget of that much suffices."""
    unit = 1024 ** min(5, max(0, (size.bit_length() - 1) // 10))
    return format_size(-(-size * 100 // unit) * unit / 100)


def whole_number(value: object) -> int:
    """``value`` as int; a whole float counts, as JSON writers say ``1e9``. Raises ``ValueError``."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):  # numpy's, too
        return operator.index(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"a whole number is needed, not {value!r}")


def not_yet(*planned: object, instead: str) -> Callable[[object], object]:
    """A validator that refuses values this version does not do yet, and says what to use."""

    def check(value: object) -> object:
        if value in planned:
            raise ValueError(f"{value!r} is not supported in this version; {instead}")
        return value

    return check


Count = Annotated[int, BeforeValidator(whole_number), Field(gt=0)]
Elements = Annotated[int, BeforeValidator(whole_number), Field(ge=0)]
Number = Annotated[float, Field(strict=True, ge=0)]
Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
Bytes = Annotated[int, BeforeValidator(parse_size)]


class Section(BaseModel):
    """A part of the configuration: frozen, finite, and without a key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
