"""Reads values from files of /proc and /sys, which may be missing, unreadable or malformed. No torch."""

from __future__ import annotations

import re
from pathlib import Path


def text_of(path: Path) -> str | None:
    """The stripped text of the file; None if it is empty or cannot be read."""
    try:
        text = path.read_bytes().decode(errors="replace").strip(" \t\r\n\0")
    except (OSError, ValueError):
        # ValueError: the path contains a null byte.
        return None
    return text or None


def number(path: Path) -> int | None:
    """The whole number in the file; None for any other text ("max", "Unknown")."""
    text = text_of(path)
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]+", text) else None


def listed(directory: Path) -> list[Path]:
    """The sorted entries of a directory; empty if it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
