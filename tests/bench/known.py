"""Readings whose figures are known."""

from __future__ import annotations

import dataclasses
from typing import Any

from frame.training import Round

GB = 10**9
MB = 10**6


def a_round(seconds: float = 4.0, **changes: Any) -> Round:
    """Two steps, with bytes and stalls."""
    defaults = Round(
        steps=2,
        seconds=seconds,
        forward=0.5,
        backward=1.0,
        update=2.0,
        settled=0.5,
        loss=5.5,
        peak=3 * GB,
        disk=(2 * GB, GB),
        counted={"read": 2 * GB, "written": GB, "stalled": 1.0},
        age=9.0,
    )
    return dataclasses.replace(defaults, **changes)
