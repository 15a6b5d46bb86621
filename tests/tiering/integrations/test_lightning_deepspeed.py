"""Lightning's own DeepSpeedStrategy runs on the engine, with the figures of DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "stage"), [("device", "2"), ("cpu", "2"), ("cpu", "3"), ("nvme", "3")])
def test_a_strategy_with_deepspeed(place: str, stage: str, tmp_path: Path) -> None:
    command = ["-m", "tests.tiering.integrations.lightning_under_shim", place, stage, str(tmp_path)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    ours, stock = seen["ours"], seen["stock"]
    assert ours["rates"] == stock["rates"]
    # Three fits of one model, whose differences add up.
    for fit, tolerance in (("losses", 1e-6), ("again", 1e-4), ("third", 1e-4)):
        assert len(ours[fit]) == 40
        assert ours[fit] == pytest.approx(stock[fit], rel=tolerance)
    assert ours["metrics"] == pytest.approx(stock["metrics"], rel=1e-6)
    assert ours["tested"] == pytest.approx(stock["tested"], rel=1e-6)
    # The summary of the model, with a column for the parts of each rank in stage 3.
    assert ("Params per Device" in ran.stderr + ran.stdout) == (stage == "3")
    assert seen["resumed"]["resumed"] == seen["resumed"]["whole"]
    assert len(seen["resumed"]["whole"]["losses"]) == 40
