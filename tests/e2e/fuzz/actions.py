"""All actions, and how programs draw them."""

from __future__ import annotations

import random

from . import edits, faults, files, passes, reads  # enter their actions
from .models import ModelPlan
from .table import ACTIONS, Action
from .training import Training

__all__ = ["ACTIONS", "Action", "draw", "edits", "faults", "files", "passes", "reads"]


def draw(rng: random.Random, plan: ModelPlan, training: Training, count: int) -> list[tuple[str, int]]:
    """Names of actions that are possible together, each with a seed; the first and the last one are updates."""
    possible = [action for action in ACTIONS.values() if action.needs.met_by(plan, training)]
    drawn = rng.choices(possible, [action.weight for action in possible], k=count)
    names = ["update", *(action.name for action in drawn), "update"]
    return [(name, rng.randrange(10**6)) for name in names]
