"""Sides taking turns, and how far the ratios of what they did can be trusted: the bootstrap, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiering.tierbench.spread import Estimate

RESAMPLES = 10_000
SEED = 20261120

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios ``ours / theirs`` of pairs: median, geometric mean, and the smallest and largest pair."""

    median: Estimate
    mean: Estimate
    smallest: float
    largest: float
    pairs: int


def in_turn(rounds: int, sides: Mapping[str, Callable[[], Found]]) -> Iterator[dict[str, Found]]:
    """What every side found in each round, so that what swings meets all of them.

    Who goes first rotates; a first round is run and dropped.
    """
    names = list(sides)
    for number in range(rounds + 1):
        first = number % len(names)
        found = {name: sides[name]() for name in names[first:] + names[:first]}
        if number:
            yield found


def take_turns(rounds: int, sides: Mapping[str, Callable[[], Found]]) -> dict[str, list[Found]]:
    """As ``in_turn``, by side: entry i is of round i."""
    readings: dict[str, list[Found]] = {name: [] for name in sides}
    for found in in_turn(rounds, sides):
        for name, reading in found.items():
            readings[name].append(reading)
    return readings


def bootstrap(values: Sequence[float] | NDArray[np.float64], statistic: Any) -> Estimate:
    """``statistic`` of ``values`` with the percentile bootstrap's 95 % interval.

    ``statistic(array, axis=1)`` reduces rows: np.median, np.mean. The seed is fixed, so the same values give the
    same interval. Raises ValueError without values.
    """
    sample: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("there is nothing to resample: no pair was measured")
    rows = np.random.default_rng(SEED).integers(0, sample.size, size=(RESAMPLES, sample.size))
    low, high = np.quantile(statistic(sample[rows], axis=1), [0.025, 0.975])
    return Estimate(float(statistic(sample[None, :], axis=1)[0]), float(low), float(high))


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Pair by pair, ``ours[i] / theirs[i]``; all estimates are made of logarithms, so that 2 and 1/2 cancel out."""
    logs = np.log(np.asarray(ours, dtype=np.float64) / np.asarray(theirs, dtype=np.float64))

    def ratio(statistic: Any) -> Estimate:
        found = bootstrap(logs, statistic)
        return Estimate(*(float(np.exp(x)) for x in (found.point, found.low, found.high)))

    return Comparison(
        ratio(np.median), ratio(np.mean), float(np.exp(logs.min())), float(np.exp(logs.max())), len(logs)
    )
