"""Texts for messages."""

from __future__ import annotations


def shorten(names: tuple[str, ...], limit: int = 3) -> str:
    """The first ``limit`` names, and the number of the others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Number and noun: "1 file", "3 files". ``plural`` is needed if it is not the noun and an "s"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
