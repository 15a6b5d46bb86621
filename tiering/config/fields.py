"""Types of configuration fields: sizes in bytes, numbers, and the base class of a section.

Sizes are bytes, written ``4K``, ``1M``, ``1GiB`` (1024-based) or ``1GB`` (10^9). The description of a field that counts
elements says so. A planned value is refused with the words "not supported in this version".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, SupportsIndex

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tiering._text import similar

ALIGNMENT = 4096
"""Alignment in bytes that O_DIRECT requires of address, offset and length."""

_UNITS = {"": 1, "B": 1, "kB": 1000}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_SPELLINGS = {unit.lower(): unit for unit in _UNITS}
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(size: float | str) -> int:
    """``size`` in bytes: a whole number, or text such as ``4K``, ``1.5GiB`` (1024-based) or ``1GB`` (10^9).

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
        raise ValueError(f"invalid size {text!r}; write a number with a unit, such as '4K', '1GiB' or '1GB'")
    number, unit = match.groups()
    if unit in _UNITS:
        return number, unit
    near = similar(unit, _SPELLINGS)
    hint = f"did you mean {_SPELLINGS[near]!r}?" if near else "use K, M, G, T, KiB ... TiB or KB ... TB"
    raise ValueError(f"unknown unit {unit!r} in size {text!r}; {hint}")


def format_size(size: float) -> str:
    """``size`` in bytes as text with a 1024-based unit, for example ``1.50 GiB``."""
    scaled, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(scaled) >= 1024 and len(units) > 1:
        scaled /= 1024
        units.pop(0)
    return f"{scaled:.0f} {units[0]}" if units[0] == "B" else f"{scaled:.2f} {units[0]}"


def legible(text: str) -> str:
    """``text`` on one line, with control characters escaped: names of directories and processes may contain them."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def format_need(size: int) -> str:
    """Like ``format_size``, but rounded up, so that a budget of the printed size suffices."""
    unit = 1024 ** min(5, max(0, (size.bit_length() - 1) // 10))
    return format_size(-(-size * 100 // unit) * unit / 100)


def same_value(first: object, second: object) -> bool:
    """Whether two values of a setting are equal, also as sizes in other notations."""
    if first == second:
        return True
    try:
        return parse_size(first) == parse_size(second)  # type: ignore[arg-type]
    except ValueError:
        return False


def whole_number(value: object) -> int:
    """``value`` as int; a float without a fraction is accepted, such as ``1e9`` in JSON. Raises ``ValueError``."""
    # SupportsIndex includes numpy's integers.
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        return operator.index(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError(f"a whole number is needed, not {value!r}")


def expand_home(path: object) -> object:
    """``path`` with the home directory in place of ``~``. Raises ``ValueError`` if there is none."""
    try:
        return Path(path).expanduser() if isinstance(path, str) else path
    except RuntimeError:
        # The named user does not exist, or the current user has no home directory.
        raise ValueError(f"no home directory for the ~ in {path!r}; write the full path") from None


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def refuse_planned(*planned_values: object, instead: str) -> Callable[[object], object]:
    """A validator that refuses the ``planned`` values and recommends ``instead``."""

    def check(value: object) -> object:
        if value in planned_values:
            raise ValueError(f"{value!r} is not supported in this version; {instead}")
        return value

    return check


Count = Annotated[int, BeforeValidator(whole_number), Field(gt=0)]
Elements = Annotated[int, BeforeValidator(whole_number), Field(ge=0)]
Number = Annotated[float, Field(strict=True, ge=0)]
Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
Bytes = Annotated[int, BeforeValidator(parse_size)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_names)]


class Section(BaseModel):
    """A section of the configuration: frozen; unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
