"""The training curve: all steps of a run in a bounded number of points, and what a mean of them is."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiering.telemetry.status_files import snapshot
from tiering.telemetry import CurveRecorder, Snapshot, StepRecord, TrainingCurve
from tiering.telemetry.training_curve import MOST_POINTS


def recorded(losses: list[float | None], norm: float | None = 1.5) -> TrainingCurve:
    recorder = CurveRecorder()
    assert recorder.curve is None
    for number, loss in enumerate(losses, 1):
        step = StepRecord(number, float(number), ended_at=100.0 + number, tokens=10 * number)
        recorder.add(step, loss, norm)
    assert recorder.curve is not None
    return recorder.curve


@given(st.integers(1, 5 * MOST_POINTS))
def test_all_steps_are_in_a_bounded_number_of_points(steps: int) -> None:
    curve = recorded([float(step) for step in range(1, steps + 1)])
    assert len(curve.step) <= MOST_POINTS
    assert len(curve.step) > MOST_POINTS / 2 or curve.stride == 1
    assert curve.step[-1] == curve.highest_loss[-1] == steps
    assert curve.ended_at[-1] == 100.0 + steps
    # Each point is the mean of its steps, and all points but the last have as many of them.
    firsts = range(1, steps + 1, curve.stride)
    lasts = [min(steps, first + curve.stride - 1) for first in firsts]
    assert curve.step == lasts
    means = [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]
    assert curve.loss == curve.seconds == pytest.approx(means, rel=1e-5)
    assert curve.tokens == pytest.approx([10 * mean for mean in means], rel=1e-5)


def test_a_step_that_diverged_does_not_hide_the_others() -> None:
    losses: list[float | None] = [1.0, math.nan, math.inf, 5.0, None, None, math.nan, math.nan]
    curve = recorded([loss for loss in losses for _ in range(MOST_POINTS)], math.inf)
    assert curve.stride == 8
    merged = dict.fromkeys(map(repr, curve.loss))
    assert list(merged) == ["1.0", "nan", "5.0", "None"]
    assert all(math.isnan(norm or 0.0) for norm in curve.gradient_norm)
    mixed = CurveRecorder()
    for number in range(MOST_POINTS + 1):
        mixed.add(StepRecord(number, 1.0), 3.0 if number % 2 else math.nan, None)
    assert mixed.curve is not None
    assert set(mixed.curve.loss[:-1]) == set(mixed.curve.highest_loss[:-1]) == {3.0}
    assert set(mixed.curve.gradient_norm) == {None}


def test_it_survives_json_and_damage_is_an_error() -> None:
    written = snapshot(curve=recorded([2.0, 3.0])).to_json()
    assert Snapshot.from_json(written).curve == recorded([2.0, 3.0])
    damaged = json.loads(written)
    damaged["curve"]["loss"].pop()
    with pytest.raises(ValueError, match="differ in length"):
        Snapshot.from_json(json.dumps(damaged))


def test_a_full_curve_leaves_room_for_the_steps() -> None:
    curve = recorded([1 / 3 + step for step in range(2 * MOST_POINTS)], 1 / 7)
    curve = TrainingCurve(
        **(vars(curve) | {"step": [10**7] * MOST_POINTS, "ended_at": [1_790_000_000.1] * MOST_POINTS})
    )
    size = len(snapshot(curve=curve).to_json()) - len(snapshot().to_json())
    assert size < 24 << 10


def test_a_spike_stays_visible() -> None:
    curve = recorded([9.0] + [1.0] * (4 * MOST_POINTS))
    assert (curve.stride, curve.loss[0], curve.highest_loss[0], curve.highest_loss[1]) == (8, 2.0, 9.0, 1.0)
