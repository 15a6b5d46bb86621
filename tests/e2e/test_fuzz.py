"""Random programs compute the same bits wherever their state lives. ``python -m tests.e2e.fuzz`` runs many of them."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.fuzz.actions import ACTIONS
from tests.e2e.fuzz.compare import check, difference, same_bits, shrunk
from tests.e2e.fuzz.faults import FailingContext, Moment
from tests.e2e.fuzz.models import BlockPlan, ModelPlan
from tests.e2e.fuzz.placements import Placement
from tests.e2e.fuzz.program import REFERENCE, Outcome, Program, execute, keep_files_in
from tests.e2e.fuzz.run import Run
from tests.e2e.fuzz.table import Effect, Needs
from tests.e2e.fuzz.training import Training
from zero3.checkpoint.adoption import Adoption

PROGRAMS = 18
MANY = 400
ROOT = Path(__file__).parents[2]


def covering(count: int) -> list[int]:
    """Seeds whose programs draw every action together, and then the first others up to ``count``."""
    drawn = {seed: {name for _, name, _ in Program.draw(seed).actions} for seed in range(200)}
    missing, chosen = set(ACTIONS), list[int]()
    while missing:
        best = max(drawn, key=lambda seed: len(drawn[seed] & missing))
        chosen.append(best)
        missing -= drawn.pop(best)
    return sorted(chosen + [*drawn][: count - len(chosen)])


SEEDS = covering(PROGRAMS)


@pytest.fixture(autouse=True)
def on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    keep_files_in(tmp_path)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_computes_the_same_wherever_its_state_lives(seed: int) -> None:
    tally = check(Program.draw(seed))
    assert tally.failures == [], "\n".join(str(shrunk(failure)) for failure in tally.failures)
    assert tally.compared > 0


def test_programs_reach_every_tier_and_seldom_end_early() -> None:
    programs = [Program.draw(seed) for seed in range(300)]
    placements = [placement for program in programs for placement in program.placements]
    for tier in ("param", "optimizer"):
        assert {getattr(placement, tier) for placement in placements} == {"none", "cpu", "nvme"}
    assert {program.training.precision for program in programs} == {"fp32", "bf16", "fp16"}
    assert sum(program.has_plain_loop for program in programs) > 30
    assert any(placement.split for placement in placements)
    assert sum(program.training.block_rows is not None for program in programs) > 20
    assert sum(program.training.tile > 0 for program in programs) > 60
    assert any(placement.cut_before for placement in placements)
    assert any(placement.step == "in_backward" for placement in placements)
    assert any(placement.snapshots and placement.versions > 1 for placement in placements)
    assert any(placement.in_files and placement.param == "nvme" for placement in placements)
    kinds = {block.kind for program in programs for block in program.plan.blocks}
    assert len(kinds) > 10


# What each action does is seen on a small model in fp32.
PLAN = ModelPlan(16, 40, (BlockPlan("mlp"), BlockPlan("bare", "not reentrant"), BlockPlan("attention")))
TRAINING = Training(decay_groups=True)


@functools.cache
def outcome(precision: str, first: int, *names: str | None, at: Placement = REFERENCE) -> Outcome:
    """Of these actions in turn, with seeds from ``first`` on; None leaves its turn out."""
    entries = tuple((number, name, first + number) for number, name in enumerate(names) if name is not None)
    return execute(Program(1, PLAN, replace(TRAINING, precision=precision), entries, ()), at)


def masters(of: Outcome) -> dict[str, torch.Tensor]:
    return {name: value for name, value in of.tensors.items() if name.startswith("master of ")}


def same_masters(first: Outcome, other: Outcome) -> bool:
    ours, theirs = masters(first), masters(other)
    return all(same_bits(ours.get(name), theirs.get(name)) for name in ours | theirs)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_has_its_effect(name: str) -> None:
    """One that changes nothing would be no test of anything."""
    effect, precision = ACTIONS[name].effect, "fp16" if Needs.FP16 in ACTIONS[name].needs else "fp32"
    for first in (0, 10, 20):
        ran, updated, without = (
            outcome(precision, first, "update", action, "update") for action in (name, "update", None)
        )
        if effect is not Effect.WEIGHTS:
            assert any(number.action == 1 for number in ran.numbers), "it records no number"
            assert same_masters(ran, updated if effect is Effect.UPDATE else without)
            return
        # Some choose at random among several effects, and among them none.
        if not same_masters(ran, without) and not same_masters(ran, updated):
            return
    raise AssertionError("the weights are as if it were not there")


def test_transfers_fail_and_a_snapshot_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    met = {"failed": 0, "undone": 0, "adopted": 0}

    def counting(owner: type, name: str, event: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            met[event] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)

    counting(FailingContext, "redirected", "failed")
    counting(Moment, "go_back", "undone")
    counting(Adoption, "run", "adopted")
    at = Placement("nvme", "nvme", threshold=0, versions=2, snapshots=True, step="in_backward")
    names = ("updates_with_failing_transfers", "snapshot", "resume_from_snapshot", "update")
    for first in range(3):
        found, expected = outcome("bf16", first, *names, at=at), outcome("bf16", first, *names)
        assert difference(expected, found) == ""
    assert min(met.values()) > 0, met


def test_a_program_of_tiles_cuts_layers_in_every_run(tmp_path: Path) -> None:
    training = replace(TRAINING, tile=1 << 10, precision="bf16")
    placements = (REFERENCE, replace(REFERENCE, cut_before=True))
    runs = [Run(PLAN, training, each, 1, tmp_path) for each in placements]
    tiles = [[weight.shape for weight in run.model.output_weights] for run in runs]
    for run in runs:
        run.close()
    assert tiles == 2 * [[(20, 16), (20, 16)]]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("tile", [0, 1 << 10])
def test_a_wrong_bit_is_found_and_told_with_fewer_actions(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    def flip(run: Run, rng: random.Random) -> None:
        if run.placement is not None and run.placement.optimizer == "nvme":
            run.loop.flip_bit()

    monkeypatch.setitem(ACTIONS, "evaluate", replace(ACTIONS["evaluate"], act=flip))
    names = ("update", "read_masters", "evaluate", "update", "generate", "update")
    entries = tuple((number, name, number) for number, name in enumerate(names))
    swapped = Placement("nvme", "nvme", threshold=0, host_share=0.0)
    training = replace(TRAINING, tile=tile)
    program = Program(7, PLAN, training, entries, (Placement("cpu", "cpu"), swapped))

    (failure,) = check(program).failures
    assert failure.placement == swapped
    least = shrunk(failure)
    assert [name for _, name, _ in least.program.actions] == ["evaluate"]
    # The bit is wrong without tiles, too.
    assert len(least.program.plan.blocks) == 1 and least.program.training.tile == 0
    report = str(least)
    assert "2:evaluate" in report and "tensors differ at the end" in report
    assert "python -m tests.e2e.fuzz --seed 7" in report


@pytest.mark.slow
def test_many_programs() -> None:
    command = [sys.executable, "-m", "tests.e2e.fuzz", "--programs", str(MANY), "--first", "100000"]
    ran = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{MANY} programs" in ran.stdout
