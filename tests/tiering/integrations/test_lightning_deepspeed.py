"""Lightning's own DeepSpeedStrategy runs on the engine, with the figures of DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .programs import finished


@pytest.mark.slow
@pytest.mark.parametrize(("place", "stage"), [("device", "2"), ("cpu", "2"), ("cpu", "3"), ("nvme", "3")])
def test_a_strategy_with_deepspeed(place: str, stage: str, tmp_path: Path) -> None:
    program = "tests.tiering.integrations.lightning_under_shim"
    ran = finished("-m", program, place, stage, str(tmp_path))
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
