"""What the recent steps took and waited for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from service.recent_steps import recent_steps
from service.responses.by_rank import curve
from service.responses.status import status
from tiering.telemetry import Snapshot, StepRecord, TrainingCurve

from .full_view import FIRST, FULL
from .full_view import SNAPSHOT as SNAPSHOT_OF_FULL

SNAPSHOT = Snapshot("gpt", 0, 1, 1, 0.0)


def test_the_first_step_of_a_run_says_nothing_of_those_that_follow() -> None:
    first = StepRecord(1, 10.0, stall=9.0, stalls={"parameters": 9.0})
    later = [StepRecord(step, 0.25, stall=0.02, stalls={"staging": 0.02}) for step in range(2, 33)]
    recent = recent_steps(replace(SNAPSHOT, steps=[first, *later]))
    assert recent is not None
    assert (recent.steps, recent.seconds, dict(recent.causes)) == (31, 0.25, {"staging": pytest.approx(0.08)})
    assert recent.share == pytest.approx(0.08)
    assert recent_steps(replace(SNAPSHOT, steps=[first])) is None


def test_a_run_has_the_throughput_of_all_its_ranks() -> None:
    run = status(FULL).runs[0]
    assert [(rank.tokens_per_second, rank.flops_per_second) for rank in run.ranks] == [(400.0, 4e11)] * 2
    # Two of its four ranks are on this node. Operations are those of one device.
    assert (run.tokens_per_second, run.flops_per_second, run.mfu) == (1600.0, 4e11, 0.5)
    assert (run.checkpoint_at, run.links) == (1_700_000_700.0, {})
    hung = replace(SNAPSHOT_OF_FULL, local_world_size=1, phase_since=1_700_000_000.0)
    stuck = replace(FULL.runs[0], ranks=(replace(FIRST, snapshot=hung, published_at=1_700_009_000.0),))
    run = status(replace(FULL, runs=(stuck,))).runs[0]
    assert (run.state, run.tokens_per_second, run.flops_per_second, run.mfu) == ("stuck", 0, 0, 0)
    without = replace(FIRST, snapshot=replace(SNAPSHOT_OF_FULL, peak_flops=None, steps=[StepRecord(2, 1.0)]))
    run = status(replace(FULL, runs=(replace(FULL.runs[0], ranks=(without,)),))).runs[0]
    assert (run.tokens_per_second, run.flops_per_second, run.mfu) == (None, None, None)


def test_a_curve_that_diverged_is_json() -> None:
    diverged = TrainingCurve(1, [1], [2.0], [3.0], [4.0], [math.nan], [math.inf], [None], [None])
    rank = replace(FIRST, snapshot=replace(SNAPSHOT_OF_FULL, curve=diverged))
    answer = curve(replace(FULL, runs=(replace(FULL.runs[0], ranks=(rank, *FULL.runs[0].ranks)),)))
    (only,) = json.loads(answer.model_dump_json())["runs"][0]["ranks"]
    assert (only["rank"], only["world_size"], only["curve"]["loss"]) == (0, 4, ["NaN"])
    assert (only["curve"]["highest_loss"], only["curve"]["gradient_norm"]) == (["Infinity"], [None])
