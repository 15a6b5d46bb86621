"""Runs with snapshots, for the tests of these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.zero3.resuming import train
from zero3.engine.engine import Engine

STEPS, SAVE_AT = 6, 3
FORMATS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "split": {"precision": "bf16", "state": "split"},
    "split+bf16": {"precision": "bf16", "state": "split+bf16"},
    "ahead": {"precision": "bf16", "state": "split", "step": "in_backward", "swap_versions": 2},
}

Begin = Callable[..., Callable[..., Engine]]


def snapshotted(make: Callable[[], Engine], saved: Path) -> tuple[Engine, list[float]]:
    """An engine that has trained ``SAVE_AT`` steps, and has saved a snapshot; and its losses."""
    torch.manual_seed(1)
    engine = make()
    torch.manual_seed(2)
    losses = train(engine, range(SAVE_AT))
    engine.snapshot_state(saved)
    return engine, losses
