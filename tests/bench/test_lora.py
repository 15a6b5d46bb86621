"""bench_lora.py runs, gives every goal, and those that no clock decides hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from frame.report import Report, Verdict
from frame.rounds import Run
from frame.side import Place, Side
from lora import training
from lora.training import RESIDENT, SWAPPED, Reading, Scale

from tiering.tierbench.comparison.fio import RunReading

SCRIPT = Path(__file__).parents[2] / "bench" / "bench_lora.py"
BY_THE_CLOCK = ("fio", "first step", "bitsandbytes", "one row")


def reading(seconds: float, *, loss: float = 5.0, read: int = 0, written: int = 0, peak: int = 0) -> Reading:
    """Three steps of a side whose plan needs 100 bytes per step and has 50 MB of budgets; fio reads 100 bytes/s."""
    counted = {"read": read, "written": written}
    steps = [{"loss": loss, "seconds": seconds, "counted": counted} for _ in range(3)]
    facts = {"needed": 100, "owned": 50_000_000, "baseline": 0}
    disk = [RunReading(100, 0, 1.0, 0.0)] * 2
    return Reading("side", facts, steps, {"adapters": "a digest", "peak": peak}, disk)


def judged(streamed: Reading, resident: Reading, memory: int | None = None) -> dict[str, Verdict]:
    scale = Scale("10M", sequence=32, rounds=2, fio_file=0, fio_seconds=0.0, memory=memory)
    run = Run(Report("a report", {}), Place(Path(), 1, 1.0), scale, Side)
    training.judge(run, "nf4", {RESIDENT: resident, SWAPPED: streamed})
    return {verdict.what.partition(": ")[2]: verdict for verdict in run.report.verdicts}


def test_what_a_run_concludes() -> None:
    goals = judged(reading(1.05, read=100, peak=300_000_000), reading(0.5))
    assert [goal.what for goal in goals.values() if not goal.holds] == [] and len(goals) == 5
    slow = judged(reading(1.2, read=101, written=1, peak=400_000_000, loss=5.5), reading(0.5))
    assert [goal.what for goal in slow.values() if goal.holds] == []
    assert slow["losses and adapters"].found == "3 of 3 losses differ, adapters equal"
    assert slow["bytes read per step"].goal == "100"
    # Compute decides where it takes longer than the disk.
    assert judged(reading(2.1, read=100), reading(2.0))["step / max(compute, bytes at fio's rate)"].holds
    for memory, holds in ((300_000_000, True), (299_999_999, False)):
        within = judged(reading(1.05, read=7, peak=300_000_000), reading(0.5), memory)
        assert within["peak RSS of all"].holds is holds and "bytes read per step" not in within


@pytest.mark.slow
def test_a_small_run_gives_every_goal(tmp_path: Path) -> None:
    """Placement, bytes and memory are exact at any size; times are those of a busy machine."""
    readings, swap = tmp_path / "readings.json", tmp_path / "swap"
    swap.mkdir()
    command = [sys.executable, str(SCRIPT), str(swap), "--quick", "--threads", "1", "--json", str(readings)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=850)
    assert done.returncode in (0, 1), done.stderr
    goals = {goal["what"]: goal for goal in json.loads(readings.read_text())["goals"]}
    for side in ("bf16, ours, NVMe", "bf16, ours, read in place", "int8, ours, NVMe", "nf4, ours, NVMe"):
        for what in ("losses and adapters", "bytes read per step", "bytes written per step", "peak RSS"):
            assert f"{side}: {what}" in goals
    for name in ("nf4", "int8", "fp8"):
        assert f"one row in bfloat16, {name}: memory / min(roof, cache)" in goals
    exact = [goal for what, goal in goals.items() if not any(word in what for word in BY_THE_CLOCK)]
    assert [goal for goal in exact if not goal["holds"]] == []
    assert list(swap.iterdir()) == []
    for table in ("products, ms, bfloat16, 256 x 256", "gradients of inputs", "adapters over a base in nf4"):
        assert table in done.stdout
