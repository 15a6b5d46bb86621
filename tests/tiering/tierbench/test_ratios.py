"""Turns, and the intervals of paired ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tiering.tierbench.ratios import bootstrap, compare, take_turns
from tiering.tierbench.spread import Estimate


class TestBootstrap:
    def test_interval_of_a_known_distribution(self) -> None:
        values = np.random.default_rng(7).normal(5.0, 2.0, size=400)
        estimate = bootstrap(values, np.mean)
        half = 1.96 * values.std() / math.sqrt(400)  # what the central limit theorem says of the mean
        assert estimate.point == pytest.approx(values.mean())
        assert estimate.low == pytest.approx(values.mean() - half, abs=0.02)
        assert estimate.high == pytest.approx(values.mean() + half, abs=0.02)

    def test_is_the_same_each_time(self) -> None:
        assert bootstrap([1.0, 2.0, 7.0], np.median) == bootstrap([1.0, 2.0, 7.0], np.median)

    def test_of_one_value_is_that_value(self) -> None:
        assert bootstrap([3.0], np.median) == Estimate(3.0, 3.0, 3.0)

    def test_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no pair was measured"):
            bootstrap([], np.mean)

    def test_covers_the_truth_as_often_as_it_says(self) -> None:
        source = np.random.default_rng(3)
        inside = 0
        for _ in range(60):
            estimate = bootstrap(source.normal(0.0, 1.0, size=40), np.mean)
            inside += estimate.low <= 0.0 <= estimate.high
        assert 52 <= inside <= 60  # 57 expected


class TestCompare:
    def test_pairs_are_divided_pair_by_pair(self) -> None:
        comparison = compare([2.0, 3.0, 8.0], [1.0, 1.0, 2.0])
        assert comparison.median.point == pytest.approx(3.0)
        assert comparison.mean.point == pytest.approx(24 ** (1 / 3))
        assert (comparison.smallest, comparison.largest) == (pytest.approx(2.0), pytest.approx(4.0))
        assert comparison.pairs == 3

    def test_double_and_half_cancel_out(self) -> None:
        assert compare([2.0, 1.0], [1.0, 2.0]).mean.point == pytest.approx(1.0)

    def test_a_swing_of_both_sides_does_not_widen_the_interval(self) -> None:
        swings = [1.0, 3.0, 0.5, 2.0]
        comparison = compare([0.9 * swing for swing in swings], swings)
        assert (comparison.median.low, comparison.median.high) == (pytest.approx(0.9), pytest.approx(0.9))


def test_everyone_is_first_in_turn_and_the_first_round_is_dropped() -> None:
    order: list[str] = []

    def side(name: str) -> int:
        order.append(name)
        return len(order)

    results = take_turns(2, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [4, 5], "b": [3, 6]}
