"""Figures as text: memory in units of 1024; transferred bytes in units of 1000, as is usual for disks and networks."""

from __future__ import annotations

import math
from collections.abc import Iterable


def size(nbytes: float) -> str:
    """Bytes of memory or of a disk: "4.0 GiB"."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def moved(nbytes: float) -> str:
    """Transferred bytes: "12.1 GB"."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def rate(bytes_per_second: float) -> str:
    """Bandwidth: "1.4 GB/s"."""
    return moved(bytes_per_second) + "/s"


def share(part: float) -> str:
    """A fraction as a percentage: "71 %"."""
    return f"{100 * part:.0f} %"


def seconds(duration: float) -> str:
    """A duration: "310 ms", "2.1 s", "1 h 05 min"."""
    if not math.isfinite(duration):
        return "unknown time"
    if duration < 0.9995:
        return f"{1000 * duration:.1f} ms" if duration < 0.00995 else f"{1000 * duration:.0f} ms"
    if duration < 99.95:
        return f"{duration:.1f} s"
    minutes = round(duration / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 file", "3 files". ``plural`` defaults to the noun with an "s"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def plain(text: str) -> str:
    """``text`` without control characters: status files are untrusted, and a terminal would execute them."""
    return "".join(character if character.isprintable() else "?" for character in text)


def joined(items: Iterable[str]) -> str:
    """Several things in a sentence: "a, b and c"."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    index = 0
    while abs(number) >= base * 0.9995 and index < len(units) - 1:
        number, index = number / base, index + 1
    return f"{number:.{0 if index == 0 or abs(number) >= 99.95 else 1}f} {units[index]}"
