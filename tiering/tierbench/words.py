"""fio's words, and how they are read: sizes, durations, rates, and the kinds of a window."""

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
"""For people."""

ALIASES: dict[str, ReadWrite] = {"readwrite": "rw", "mixed": "rw"}
ENGINES = ("auto", "io_uring", "libaio", "threads")
ENGINE_ALIASES = {"psync": "threads", "sync": "threads", "pvsync": "threads"}

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", re.ASCII)
_LETTER = re.compile(r"[\d.]+[kmgtp]", re.ASCII)  # as fio has it
_LONGEST = 7 * 86400.0
_SECONDS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def said(read: Callable[[str], Any], text: str) -> Any:
    """What ``read`` makes of ``text``; argparse does not show the words of a ValueError."""
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def directory(text: str) -> Path:
    """A directory by its name, which is not empty: that is the current one to the system, and a mistake of a script."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no directory; '.' is the current one")
    return Path(text)


def size(text: str) -> int:
    """Bytes, above 0: ``4K`` or ``4k``, ``1M``, ``1MiB`` are 1024-based, ``1MB`` is 10^6."""
    from tiering.config.fields import parse_size

    if _LETTER.fullmatch(text):
        text = text.upper()
    nbytes: int = said(parse_size, text)
    if not nbytes:
        raise argparse.ArgumentTypeError("at least one byte")
    return nbytes


def rate(text: str) -> float:
    """Bytes per second: ``3GiB/s``, ``3GB/s``, ``500M``."""
    return float(size(text.strip().removesuffix("/s")))


def brief(nbytes: int) -> str:
    """``128K``, ``1M``: as it is typed; ``size`` reads it back."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if nbytes and nbytes % unit == 0:
            return f"{nbytes // unit}{name}"
    return str(nbytes)


def duration(text: str) -> float:
    """Seconds, a week at most: ``10``, ``10s``, ``500ms``, ``2m``, ``1h``."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"a time is a number with ms, s, m or h, as '10s', not {text!r}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is more than a week")
    return seconds


def kinds(text: str) -> tuple[ReadWrite, ...]:
    """One or several of fio's --rw, with commas: ``read``, ``randread,randwrite``."""
    named = [ALIASES.get(each, each) for each in text.split(",")]
    for each in named:
        if each not in READ_WRITE:
            raise argparse.ArgumentTypeError(f"{each!r} is not measured; choose from {', '.join(READ_WRITE)}")
    return tuple(dict.fromkeys(named))  # type: ignore[arg-type]  # just looked up


def engine(text: str) -> str:
    """An I/O engine by fio's name; its synchronous ones are our threads."""
    named = ENGINE_ALIASES.get(text, text)
    if named not in ENGINES:
        raise argparse.ArgumentTypeError(f"there is no engine {text!r}; choose from {', '.join(ENGINES)}")
    return named


def reads(rw: ReadWrite) -> bool:
    return rw not in ("write", "randwrite")


def writes(rw: ReadWrite) -> bool:
    return rw not in ("read", "randread")


def is_random(rw: ReadWrite) -> bool:
    return rw.startswith("rand")
