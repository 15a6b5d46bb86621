"""What bench_tiles.py concludes, and that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from frame.measured import Measured
from frame.report import Report
from frame.side import Place, Side
from tiles.case import CONSTANT, FULL, IN_MEMORY, IN_TILES, MIB, Sides, judge

from tiering.tierbench.comparison.fio import RunReading

from .known import GB, a_round

BYTES, PEAK, BITS, TIME = (
    "bytes read and written per step",
    "peak RSS of steps, net of baseline",
    "weights after all rounds",
    "step / (step in memory + bytes at fio's rate)",
)


@pytest.fixture
def run(place: Place) -> Sides:
    return Sides(Report("known", {}), place, FULL, Side)


def in_tiles(seconds: float = 4.0, *, read: int = 2 * GB, peak: int = 0) -> Measured:
    """Reads 2 GB and writes 1 GB a step, for which fio takes 2 s."""
    facts = {"planned_read": 2 * GB, "planned_written": GB, "baseline": 100 * MIB}
    rounds = [a_round(seconds, steps=1, counted={"read": read, "written": GB}, peak=peak)] * 2
    return Measured(IN_TILES, facts, rounds, (0, 0), [RunReading(3 * GB // 4, 3 * GB // 4, 1.0, 0.1)] * 2)


def holds(
    run: Sides, tiles: Measured | None, *, masters: str = "bits", memory: bool = True
) -> dict[str, bool]:
    run.report.verdicts.clear()
    run.masters = {IN_TILES: "bits", IN_MEMORY: masters}
    resident = Measured(IN_MEMORY, {}, [a_round(1.0, steps=1)] * 2, (0, 0))
    sides = ([tiles] if tiles else []) + ([resident] if memory else [])
    judge(run, {side.name: side for side in sides})
    return {verdict.what: verdict.holds for verdict in run.report.verdicts}


def test_every_goal_has_two_sides(run: Sides) -> None:
    most = FULL.device + FULL.host + CONSTANT + 100 * MIB
    assert holds(run, in_tiles(3.4, peak=most)) == dict.fromkeys((BYTES, PEAK, BITS, TIME), True)
    assert not holds(run, in_tiles(3.5))[TIME]
    assert not holds(run, in_tiles(peak=most + 1))[PEAK]
    assert not holds(run, in_tiles(read=2 * GB + 1))[BYTES]
    assert not holds(run, in_tiles(), masters="others")[BITS]


def test_what_is_missing_is_told(run: Sides) -> None:
    assert holds(run, None) == {}
    assert list(holds(run, in_tiles(), memory=False)) == [BYTES, PEAK]
    assert run.report.skipped == [
        f"a block that is larger than the device: not measured without {IN_TILES}",
        f"the bits and the time of the same in memory: not measured without {IN_MEMORY}",
    ]


def test_the_model_is_larger_than_its_budgets() -> None:
    assert FULL.block > 4 * (FULL.device + FULL.host) and FULL.matrix == 512 * MIB


@pytest.mark.slow
def test_a_small_run_gives_every_goal(command: Callable[..., tuple[int, str, Any, str]]) -> None:
    """Bits, bytes and memory are exact at any size; times are those of a busy machine."""
    _, text, raw, output = command("bench_tiles.py", "--quick", "--threads", "1")
    goals = {goal["what"]: goal["holds"] for goal in raw["goals"]}
    assert {goals[BYTES], goals[PEAK], goals[BITS]} == {True}, goals
    assert f"| {IN_TILES} |" in text and f"| {IN_MEMORY} |" in text and output.count("case ") == 1
