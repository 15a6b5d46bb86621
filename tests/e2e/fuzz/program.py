"""A program: a model, a way to train, actions, and the placements that must not change a bit of what it computes."""

from __future__ import annotations

import copy
import logging
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from tiering.errors import EngineStateError, ResidencyError
from tiering.storage import arena
from zero3.device import nan_memory

from . import actions
from .models import ModelPlan
from .placements import Placement
from .run import Number, Run
from .training import PLAIN, Training

REFERENCE = Placement()
STARVED_AFTER_SECONDS = 5.0
"""A lease that nobody gives back ends a run after this time; engines wait for longer."""


@dataclass(frozen=True)
class Program:
    """What a seed draws. ``number`` of an action is its place in what was drawn, which shrinking keeps."""

    seed: int
    plan: ModelPlan
    training: Training
    actions: tuple[tuple[int, str, int], ...]  # number, name, seed
    placements: tuple[Placement, ...]

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        plan, training = ModelPlan.draw(rng), Training.draw(rng)
        # Of its own numbers: programs without it are those of before.
        if plan.runs_in_chunks and random.Random(f"rows {seed}").random() < 0.8:
            training = replace(training, block_rows=1)
        tiles = random.Random(f"tiles {seed}")
        # Such a model uses a layer's weight without calling the layer.
        if not plan.reads_embedding and tiles.random() < 0.4:
            training = replace(training, tile=tiles.choice((1 << 10, 2 << 10, 4 << 10)))
        drawn = actions.draw(rng, plan, training, rng.randint(3, 10))
        in_place = any(actions.ACTIONS[name].in_place for name, _ in drawn)
        training = replace(training, may_split=not in_place)
        placements = tuple(Placement.draw(rng, training) for _ in range(rng.choice((1, 2))))
        if not any(actions.ACTIONS[name].frozen for name, _ in drawn):
            placements = tuple(replace(each, in_files=rng.random() < 0.3) for each in placements)
        if training.tile:
            placements = tuple(replace(each, cut_before=tiles.random() < 0.3) for each in placements)
        numbered = tuple((number, name, its_seed) for number, (name, its_seed) in enumerate(drawn))
        return cls(seed, plan, training, numbered, placements)

    @property
    def has_plain_loop(self) -> bool:
        """Whether a plain PyTorch loop in fp32 does the same."""
        plainly = all(actions.ACTIONS[name].plain for _, name, _ in self.actions)
        # Chunks draw other random numbers than all rows at once.
        plainly &= self.training.block_rows is None or not self.plan.draws_random_numbers
        return plainly and self.training.precision == "fp32" and self.training.rule in PLAIN

    def __str__(self) -> str:
        names = " ".join(f"{number}:{name}" for number, name, _ in self.actions)
        return f"seed {self.seed}\n  model: {self.plan}\n  training: {self.training}\n  actions: {names}"


@dataclass
class Outcome:
    """What a run of a program has computed. ``ended``: the error that ended it, "" if none did."""

    numbers: list[Number] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ended: str = ""
    retried: bool = False  # the first try was refused, with a remedy


def execute(program: Program, placement: Placement | None) -> Outcome:
    """Run ``program`` at ``placement`` (None: in the plain loop).

    Where the model needs more groups at once than the least room holds, or a recomputation reads what a step in
    backward has updated, an error says so with a remedy. Then it runs again with that.
    """
    try:
        return _execute(program, placement)
    except (ResidencyError, EngineStateError) as error:
        if placement is None:
            raise
        no_room = "no room" in str(error)
        if no_room:
            instead = placement.roomier()
        elif "Set tiering.step to" in str(error):
            instead = replace(placement, step="after")
        else:
            raise
    outcome = _execute(program, instead, roomy=no_room)
    outcome.retried = True
    return outcome


def _execute(program: Program, placement: Placement | None, *, roomy: bool = False) -> Outcome:
    outcome = Outcome()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-", dir=scratch())))
        stack.enter_context(_quietly())
        stack.enter_context((placement or REFERENCE).machine())
        if any(actions.ACTIONS[name].failing for _, name, _ in program.actions):
            stack.enter_context(actions.faults.possible())
        run = Run(program.plan, program.training, placement, program.seed, directory, roomy=roomy)
        stack.callback(run.close)
        outcome.numbers = run.numbers
        torch.manual_seed(program.seed + 1)
        try:
            for number, name, seed in program.actions:
                run.action = number
                actions.ACTIONS[name](run, seed)
            run.finish_window(random.Random(program.seed))
        except CheckpointError as error:
            # A recomputation that went another way than its forward: plain torch refuses that, too.
            outcome.ended = f"action {run.action}: {type(error).__name__}"
        else:
            outcome.tensors = _left_by(run)
    return outcome


def _left_by(run: Run) -> dict[str, Tensor]:
    """Weights, buffers, masters, optimizer state and random numbers' state."""
    state = dict(copy.deepcopy(run.loop.state_dict()))
    state |= {f"buffer {name}": value.clone() for name, value in run.model.named_buffers()}
    for name, master in run.loop.master_state_dict().items():
        state[f"master of {name}"] = master
        for part in run.parts_of(name):
            for key in run.loop.state_names:
                state[f"{key} of {part}"] = run.loop.get_fp32_state(part, key)
    state["random state"] = torch.get_rng_state()
    state["steps"] = torch.tensor([run.loop.global_steps, run.loop.skipped_steps])
    rates = [group["lr"] for group in run.loop.optimizer.param_groups]
    state["rates"] = torch.tensor(rates, dtype=torch.float64)
    return state


_scratch: list[Path | None] = [None]


def scratch() -> Path | None:
    """Where programs keep their files; None is the system's directory for temporary ones."""
    return _scratch[0]


def keep_files_in(directory: Path) -> None:
    """Programs keep their files in ``directory``, which is on a disk, from now on."""
    _scratch[0] = directory


@contextmanager
def _quietly() -> Iterator[None]:
    """What many short runs would log and warn of is left out; the engine is small and does not wait for long."""
    loggers = [logging.getLogger(name) for name in ("tiering", "zero3")]
    levels = [logger.level for logger in loggers]
    before = arena.STARVED_AFTER_SECONDS, nan_memory.BLOCK, torch.get_num_threads()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    arena.STARVED_AFTER_SECONDS, nan_memory.BLOCK = STARVED_AFTER_SECONDS, 16 << 10
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        arena.STARVED_AFTER_SECONDS, nan_memory.BLOCK = before[0], before[1]
        torch.set_num_threads(before[2])
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
