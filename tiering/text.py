"""Texts for messages."""

from __future__ import annotations


def shorten(names: tuple[str, ...], most: int = 3) -> str:
    """``names`` for a message: the first few, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """``number`` of them: "1 file", "3 files"; ``plural`` where it is not the noun and an "s"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
