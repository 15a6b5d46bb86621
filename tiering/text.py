"""Texts for messages."""

from __future__ import annotations


def shorten(names: tuple[str, ...], most: int = 3) -> str:
    """``names`` for a message: the first few, and how many more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
