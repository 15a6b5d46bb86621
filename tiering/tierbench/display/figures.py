"""Formats of numbers in tables and messages: three significant digits, with a fitting unit."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tiering.config.fields import legible as legible
from tiering.tierbench.result import Result, Row
from tiering.tierbench.words import NAMES, brief

SUSTAINED = "sustained write"


def number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits and no exponent: ``0.0512``, ``1.83``, ``151``, ``1,230``."""
    if not value:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    return f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def gb(rate: float) -> str:
    """Bytes per second in GB/s."""
    return number(rate / 1e9)


def gib(rate: float) -> str:
    """Bytes per second in GiB/s."""
    return number(rate / 2**30)


def nbytes(count: float, digits: int = 3) -> str:
    """Bytes in decimal units, as drives and their endurance are sold: ``12.3 GB``."""
    return _scaled(count, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)), digits)


def operations(count: float) -> str:
    """``745``, ``45.3k``, ``1.23M``."""
    return _scaled(count, (("M", 1e6), ("k", 1e3), ("", 1.0))).replace(" ", "")


def latency(seconds: float) -> str:
    """``84.2us``, ``1.24ms``, ``2.31s``."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))).replace(" ", "")


def duration(seconds: float, digits: int = 3) -> str:
    """``48 s``, ``12.3 min``, ``2.10 h``."""
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    return _scaled(seconds, units if seconds >= 600 else units[-1:], digits)


def _scaled(value: float, units: tuple[tuple[str, float], ...], digits: int = 3) -> str:
    """``value`` in the largest of ``units`` in which its rounded value is at least one."""
    rounded = float(f"{value:.{digits - 1}e}")
    name, unit = next((each for each in units if rounded >= each[1]), units[-1])
    return f"{number(value / unit, digits)} {name}".rstrip()


def named_rows(result: Result) -> Iterator[tuple[str, Row]]:
    """The rows with their names. The row of --sustained is also of kind "write", so its bytes identify it."""
    sustained = result.sustained
    for row in result.rows:
        if sustained is not None and row.rw == "write" and row.write.bytes == sustained.written_bytes:
            sustained = None
            yield SUSTAINED, row
        else:
            yield NAMES[row.rw], row


def load(result: Result) -> str:
    """The load, with fio's names."""
    settings = result.settings
    mixed = any(row.rw in ("rw", "randrw") for row in result.rows)
    parts = [
        f"bs {brief(settings.bs)} ({settings.bs} bytes)",
        f"iodepth {settings.iodepth}",
        f"numjobs {settings.numjobs}",
        f"size {brief(settings.size)}",
        f"rwmixread {settings.rwmixread}" if mixed and settings.rwmixread != 50 else "",
        "O_DIRECT" if settings.direct else "buffered (page cache and drive together)",
    ]
    return ", ".join(part for part in parts if part)
