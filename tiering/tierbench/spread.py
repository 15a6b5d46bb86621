"""Confidence intervals for the ratio of the rates of two measurement intervals, from their samples.

Samples of a tenth of a second are correlated with their neighbours: a drive that is slow now is slow a moment later.
Treated as independent, they would give confidence intervals that are too narrow. So they are averaged in batches, which
are longer when the correlation is higher: the method of batch means, with Carlstein's length for a first-order
autoregression (Annals of Statistics 14, 1986). Samples do not show changes between the two measurement intervals.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BATCHES = 4
_MAX_CORRELATION = 0.95  # of neighbours: above it, batches could not be long enough
_NORMAL = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A point estimate and the ends of its 95 % confidence interval."""

    point: float
    low: float
    high: float

    @property
    def contains_one(self) -> bool:
        return self.low <= 1.0 <= self.high

    def of_rates(self, name: str, baseline: str) -> str:
        """This ratio of the rates of ``name`` and ``baseline`` as a sentence."""
        if self.contains_one:
            return f"no difference between {name} and {baseline} beyond noise"
        bounds = sorted(abs(end - 1) for end in (self.low, self.high))
        direction = "faster" if self.point > 1 else "slower"
        return (
            f"{name} is {direction} than {baseline} by {abs(self.point - 1):.1%}"
            f" ({bounds[0]:.1%} to {bounds[1]:.1%})"
        )

    def __str__(self) -> str:
        return f"{self.point:.3f} ({self.low:.3f}-{self.high:.3f})"


def rate_ratio(first: Sequence[float], second: Sequence[float], *, point: float) -> Estimate | None:
    """The confidence interval around ``point``, the second rate divided by the first, from samples of both rates.

    None if a measurement interval has too few samples, or all its samples are zero.
    """
    errors = [_relative_error(rates) for rates in (first, second)]
    (first_variance, first_freedom), (second_variance, second_freedom) = (
        each or (math.nan, 1) for each in errors
    )
    variance = first_variance + second_variance
    if math.isnan(variance) or point <= 0.0:
        return None
    half = 0.0
    if variance:
        # The degrees of freedom of Welch and Satterthwaite.
        freedom = variance**2 / (first_variance**2 / first_freedom + second_variance**2 / second_freedom)
        half = _student(freedom) * math.sqrt(variance)
    return Estimate(point, point * math.exp(-half), point * math.exp(half))


def _relative_error(rates: Sequence[float]) -> tuple[float, int] | None:
    """Variance of the logarithm of the mean rate, and its degrees of freedom."""
    count = len(rates)
    if count < MIN_BATCHES or not (mean := statistics.fmean(rates)):
        return None
    length = min(_batch_length(rates), count // MIN_BATCHES)
    batches = count // length
    skipped = count - batches * length  # at the start, where the queues fill
    means = [statistics.fmean(rates[at : at + length]) for at in range(skipped, count, length)]
    return statistics.variance(means) / batches / mean**2, batches - 1


def _batch_length(rates: Sequence[float]) -> int:
    count, mean = len(rates), statistics.fmean(rates)
    deviations = [rate - mean for rate in rates]
    variance_sum = sum(each * each for each in deviations)
    if not variance_sum:
        return 1
    correlation = sum(first * second for first, second in itertools.pairwise(deviations)) / variance_sum
    correlation += (1 + 4 * correlation) / count  # bias of the estimate from few samples (Kendall, 1954)
    correlation = min(max(correlation, 0.0), _MAX_CORRELATION)
    return max(1, math.ceil(math.cbrt((2 * correlation / (1 - correlation**2)) ** 2 * count)))


def _student(freedom: float) -> float:
    """The 97.5th percentile of Student's t, by its expansion around the normal one (Abramowitz and Stegun 26.7.5)."""
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
