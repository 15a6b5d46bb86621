"""Files of /proc and /sys: one value each, and any of them may be missing, forbidden or odd. No torch."""

from __future__ import annotations

import re
from pathlib import Path


def said(path: Path) -> str | None:
    """What the file holds, without padding; None if that is nothing, or not for us."""
    try:
        text = path.read_bytes().decode(errors="replace").strip(" \t\r\n\0")
    except (OSError, ValueError):  # ValueError: a name with a null byte in it
        return None
    return text or None


def number(path: Path) -> int | None:
    """The whole number that the file holds; None if it holds anything else ("max", "Unknown")."""
    text = said(path)
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]+", text) else None


def listed(directory: Path) -> list[Path]:
    """What lies in a directory, sorted; nothing if there is none."""
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
