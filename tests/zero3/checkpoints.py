"""What tests of checkpoints begin with, and look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from zero3.engine.engine import Engine

from .resuming import Left, Model, straight

SETTINGS: dict[str, Any] = {"precision": "bf16", "accumulation": 1, "threshold": 40}
Start = Callable[..., Engine]


def begin(start: Start, build: Callable[[], nn.Module] = Model, **options: Any) -> Engine:
    return start(build(), **(SETTINGS | options))


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def undisturbed(start: Start, steps: int, **options: Any) -> Left:
    return straight(lambda: begin(start, **options), steps)
