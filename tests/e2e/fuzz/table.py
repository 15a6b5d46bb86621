"""The table of actions: what a training loop does, each by its name, with what it needs and what it changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any

from .models import ModelPlan
from .run import Run
from .training import Training

Act = Callable[[Run, random.Random], None]


class Needs(Flag):
    """What a program must be for an action to be possible."""

    NOTHING = 0
    STEP_APART = auto()  # gradients wait for step()
    ONE_MICRO_BATCH = auto()  # per update
    # Through such a checkpoint, and through chunks of rows, torch.autograd.grad gives no gradients.
    NO_REENTRANT_CHECKPOINT = auto()
    NO_SHARED_BLOCK = auto()
    FP32 = auto()
    FP16 = auto()

    def met_by(self, plan: ModelPlan, training: Training) -> bool:
        return not (
            (Needs.STEP_APART in self and training.may_step_in_backward)
            or (Needs.ONE_MICRO_BATCH in self and training.accumulation > 1)
            or (Needs.NO_REENTRANT_CHECKPOINT in self and (plan.reentrant or training.block_rows is not None))
            or (Needs.NO_SHARED_BLOCK in self and plan.last_block_shared)
            or (Needs.FP32 in self and training.precision != "fp32")
            or (Needs.FP16 in self and training.precision != "fp16")
        )


class Effect(Enum):
    """What an action changes of a run: a test holds each one to it."""

    WEIGHTS = "other weights than without it, and other ones than an update leaves"
    UPDATE = "the weights that an update leaves"
    NUMBERS = "numbers of its own, and the weights as they were"


@dataclass(frozen=True)
class Action:
    """One thing that a training loop does.

    ``weight``: how often it is drawn. ``clean``: it begins where no gradients wait. ``plain``: PlainLoop can do it.
    ``in_place``: it edits weights in a forward, where a split master loses its lower half, as documented. ``frozen``:
    it may change frozen weights, which must not be read from files then. ``failing``: transfers fail while it runs.
    """

    name: str
    act: Act
    effect: Effect
    needs: Needs
    weight: float
    clean: bool
    plain: bool
    in_place: bool
    frozen: bool
    failing: bool

    def __call__(self, run: Run, seed: int) -> None:
        rng = random.Random(seed)
        if self.clean:
            run.finish_window(rng)
        self.act(run, rng)


ACTIONS: dict[str, Action] = {}


def action(effect: Effect, needs: Needs = Needs.NOTHING, **options: Any) -> Callable[[Act], Act]:
    """Enter a function into the table, by its name."""

    def enter(act: Act) -> Act:
        name = act.__name__
        assert name not in ACTIONS
        flags = dict.fromkeys(("in_place", "frozen", "failing"), False)
        settings = {"weight": 1.0, "clean": True, "plain": True} | flags | options
        ACTIONS[name] = Action(name, act, effect, needs, **settings)
        return act

    return enter
