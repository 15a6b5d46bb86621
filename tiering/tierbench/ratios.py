"""Alternates the sides of a comparison, and estimates the ratios of their readings by bootstrap, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiering.tierbench.spread import Estimate

RESAMPLES = 10_000
SEED = 20261120

Reading = TypeVar("Reading")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios of pairs of readings: median, geometric mean, and the smallest and largest ratio."""

    median: Estimate
    mean: Estimate
    smallest: float
    largest: float
    pairs: int


def in_turn(rounds: int, sides: Mapping[str, Callable[[], Reading]]) -> Iterator[dict[str, Reading]]:
    """Yield each round's readings by side. All sides run in each round, so that changes of a drive affect all of them.

    The first side rotates; one round before the others is run and discarded.
    """
    names = list(sides)
    for number in range(rounds + 1):
        first = number % len(names)
        readings = {name: sides[name]() for name in names[first:] + names[:first]}
        if number:
            yield readings


def take_turns(rounds: int, sides: Mapping[str, Callable[[], Reading]]) -> dict[str, list[Reading]]:
    """As ``in_turn``, but by side: entry i of a side's list is its reading of round i."""
    readings: dict[str, list[Reading]] = {name: [] for name in sides}
    for by_side in in_turn(rounds, sides):
        for name, reading in by_side.items():
            readings[name].append(reading)
    return readings


def bootstrap(values: Sequence[float] | NDArray[np.float64], statistic: Any) -> Estimate:
    """``statistic`` of ``values`` with the percentile bootstrap's 95 % interval.

    ``statistic(array, axis=1)`` reduces rows: np.median, np.mean. The seed is fixed, so the same values give the
    same interval. Raises ValueError without values.
    """
    sample: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("nothing to resample: no pair was measured")
    rows = np.random.default_rng(SEED).integers(0, sample.size, size=(RESAMPLES, sample.size))
    low, high = np.quantile(statistic(sample[rows], axis=1), [0.025, 0.975])
    return Estimate(float(statistic(sample[None, :], axis=1)[0]), float(low), float(high))


def compare(numerators: Sequence[float], denominators: Sequence[float]) -> Comparison:
    """Estimate the ratios ``numerators[i] / denominators[i]``, from logarithms, so that 2 and 1/2 cancel out."""
    logs = np.log(np.asarray(numerators, dtype=np.float64) / np.asarray(denominators, dtype=np.float64))

    def ratio(statistic: Any) -> Estimate:
        estimate = bootstrap(logs, statistic)
        return Estimate(*(float(np.exp(x)) for x in (estimate.point, estimate.low, estimate.high)))

    return Comparison(
        ratio(np.median), ratio(np.mean), float(np.exp(logs.min())), float(np.exp(logs.max())), len(logs)
    )
