"""Parsers of option values in fio's syntax: sizes, durations, rates, and kinds of load."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

ReadWrite = Literal["read", "write", "rw", "randread", "randwrite", "randrw"]
READ_WRITE: tuple[ReadWrite, ...] = get_args(ReadWrite)
NAMES: dict[ReadWrite, str] = {
    "read": "read",
    "write": "write",
    "rw": "mixed",
    "randread": "random read",
    "randwrite": "random write",
    "randrw": "random mixed",
}
"""Names in printed tables."""

ALIASES: dict[str, ReadWrite] = {"readwrite": "rw", "mixed": "rw"}
ENGINES = ("auto", "io_uring", "libaio", "threads")
ENGINE_HELP = f"I/O engine: {', '.join(ENGINES)} (default: auto)"
ENGINE_ALIASES = {"psync": "threads", "sync": "threads", "pvsync": "threads"}

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", re.ASCII)
_LETTER = re.compile(r"[\d.]+[kmgtp]", re.ASCII)  # fio accepts lower-case units
_LONGEST = 7 * 86400.0
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parsed(parse: Callable[[str], Any], text: str) -> Any:
    """``parse(text)``, with a ValueError as ArgumentTypeError: argparse does not print a ValueError's message."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def directory(text: str) -> Path:
    """A directory's path. An empty name is refused: ``Path("")`` is the current directory, but a script's mistake."""
    if not text:
        raise argparse.ArgumentTypeError(
            "an empty name is not a directory; use '.' for the current directory"
        )
    return Path(text)


def size(text: str) -> int:
    """Bytes, above 0: ``4K`` or ``4k``, ``1M``, ``1MiB`` are 1024-based, ``1MB`` is 10^6."""
    from tiering.config.fields import parse_size

    if _LETTER.fullmatch(text):
        text = text.upper()
    nbytes: int = parsed(parse_size, text)
    if not nbytes:
        raise argparse.ArgumentTypeError("a size must be at least one byte")
    return nbytes


def rate(text: str) -> float:
    """Bytes per second: ``3GiB/s``, ``3GB/s``, ``500M``."""
    return float(size(text.strip().removesuffix("/s")))


def brief(nbytes: int) -> str:
    """``128K``, ``1M``: as on a command line; ``size`` parses it."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def duration(text: str) -> float:
    """Seconds, at most a week: ``10``, ``10s``, ``500ms``, ``2m``, ``1h``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time; write a number with ms, s, m or h, such as '10s'"
        )
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is more than a week")
    return seconds


def kinds(text: str) -> tuple[ReadWrite, ...]:
    """One or several of fio's --rw values, separated by commas: ``read``, ``randread,randwrite``."""
    choices = [ALIASES.get(each, each) for each in text.split(",")]
    for each in choices:
        if each not in READ_WRITE:
            raise argparse.ArgumentTypeError(
                f"{each!r} is not a kind of load; choose from {', '.join(READ_WRITE)}"
            )
    return tuple(dict.fromkeys(choices))  # type: ignore[arg-type]  # checked above


def engine(text: str) -> str:
    """An I/O engine by fio's name; fio's synchronous engines are "threads" here."""
    name = ENGINE_ALIASES.get(text, text)
    if name not in ENGINES:
        raise argparse.ArgumentTypeError(f"unknown engine {text!r}; choose from {', '.join(ENGINES)}")
    return name


def reads(rw: ReadWrite) -> bool:
    return rw not in ("write", "randwrite")


def writes(rw: ReadWrite) -> bool:
    return rw not in ("read", "randread")


def is_random(rw: ReadWrite) -> bool:
    return rw.startswith("rand")
