"""What the recent steps took and waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.recent_steps import recent_steps
from tiering.telemetry import Snapshot, StepRecord

SNAPSHOT = Snapshot("gpt", 0, 1, 1, 0.0)


def test_the_first_step_of_a_run_says_nothing_of_those_that_follow() -> None:
    first = StepRecord(1, 10.0, stall=9.0, stalls={"parameters": 9.0})
    later = [StepRecord(step, 0.25, stall=0.02, stalls={"staging": 0.02}) for step in range(2, 33)]
    recent = recent_steps(replace(SNAPSHOT, steps=[first, *later]))
    assert recent is not None
    assert (recent.steps, recent.seconds, dict(recent.causes)) == (31, 0.25, {"staging": pytest.approx(0.08)})
    assert recent.share == pytest.approx(0.08)
    assert recent_steps(replace(SNAPSHOT, steps=[first])) is None
