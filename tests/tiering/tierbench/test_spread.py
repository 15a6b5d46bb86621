"""The interval of a ratio between two windows: right as often as it says, wider where samples hang together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiering.tierbench.spread import rate_ratio

rates = st.lists(st.floats(1e6, 1e10), min_size=4, max_size=40)


def swinging(source: np.random.Generator, count: int, *, alike: float, by: float) -> NDArray[np.float64]:
    """Rates around 1, each resembling the one before it."""
    steps = source.normal(size=count)
    rates = np.empty(count)
    rates[0] = steps[0]
    for at in range(1, count):
        rates[at] = alike * rates[at - 1] + math.sqrt(1 - alike**2) * steps[at]
    return np.exp(by * rates - by**2 / 2)


@pytest.mark.parametrize(("alike", "least"), [(0.0, 0.9), (0.5, 0.87), (0.8, 0.8)])
def test_the_truth_is_inside_as_often_as_it_says(alike: float, least: float) -> None:
    source = np.random.default_rng(11)
    inside, rounds = 0, 200
    for _ in range(rounds):
        first, second = (swinging(source, 40, alike=alike, by=0.25) for _ in range(2))
        interval = rate_ratio(list(first), list(1.2 * second), point=1.2 * second.mean() / first.mean())
        assert interval is not None
        inside += interval.low <= 1.2 <= interval.high
    assert least <= inside / rounds < 1.0


def test_neighbours_that_are_alike_count_for_less() -> None:
    source = np.random.default_rng(5)
    steady = swinging(source, 60, alike=0.0, by=0.3)
    drifting = np.sort(steady)  # the same rates, in an order that no short stretch tells of
    width = {}
    for name, second in (("steady", steady), ("drifting", drifting)):
        interval = rate_ratio(list(steady), list(second), point=1.0)
        assert interval is not None
        width[name] = interval.high - interval.low
    assert width["drifting"] > 2 * width["steady"]


@given(first=rates, second=rates, point=st.floats(0.01, 100))
def test_turned_round_it_is_the_inverse(first: list[float], second: list[float], point: float) -> None:
    there, back = rate_ratio(first, second, point=point), rate_ratio(second, first, point=1 / point)
    assert there is not None and back is not None
    assert there.low <= point <= there.high
    assert back.low == pytest.approx(1 / there.high)
    assert back.high == pytest.approx(1 / there.low)


def test_equal_rates_leave_no_doubt_and_few_or_none_leave_no_interval() -> None:
    interval = rate_ratio([2.0] * 10, [3.0] * 10, point=1.5)
    assert interval is not None and not interval.contains_one
    assert (interval.low, interval.high) == (1.5, 1.5)
    assert rate_ratio([2.0] * 3, [2.0] * 10, point=1.0) is None
    assert rate_ratio([0.0] * 10, [2.0] * 10, point=1.0) is None
