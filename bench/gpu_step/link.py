"""The rates of the link between host and device, as gpu_copy.py measures them in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BENCH = Path(__file__).resolve().parents[1]
NO_DEVICE = 2  # its exit status


class LinkError(RuntimeError):
    """It failed; the message says what it said last."""


@dataclass(frozen=True, slots=True)
class Link:
    """A card, and rates in bytes per second, medians. ``alone`` and ``both`` map "h2d" and "d2h" to pinned rates."""

    card: str
    memory: int
    driver: str
    alone: dict[str, float]
    both: dict[str, float]
    engine: dict[str, float]
    """Those of the engine's own copies, in both directions at once."""


def measure(seconds: float) -> Link | None:
    """None where torch finds no device. Raises LinkError."""
    try:
        ran = subprocess.run(
            [sys.executable, str(_BENCH / "gpu_copy.py"), "--json"],
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise LinkError(f"gpu_copy.py took more than {seconds:.0f} s") from error
    if ran.returncode == NO_DEVICE:
        return None
    if ran.returncode not in (0, 1):
        message = " / ".join(ran.stderr.strip().splitlines()[-3:])
        raise LinkError(f"gpu_copy.py ended with status {ran.returncode}: {message}")
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return Link(**figures)
