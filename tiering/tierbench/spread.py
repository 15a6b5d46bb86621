"""How far the ratio of two windows' rates can be trusted, by what they did from sample to sample.

Samples of a tenth of a second resemble their neighbours: a drive that is slow now is slow a moment later. Taken one by
one they would promise too much, so they are taken in batches that are longer the more neighbours are alike: the method
of batch means, with Carlstein's length for a first-order autoregression (Annals of Statistics 14, 1986). What changes
from one window to the next no sample knows of.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_BATCHES = 4
_MOST_ALIKE = 0.95  # correlation of neighbours: beyond it, batches could not be long enough
_NORMAL = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A point estimate and the ends of its 95 % interval."""

    point: float
    low: float
    high: float

    @property
    def holds_one(self) -> bool:
        return self.low <= 1.0 <= self.high

    def of_rates(self, ours: str, theirs: str) -> str:
        """What this ratio of the rates of ``ours`` and ``theirs`` says of them."""
        if self.holds_one:
            return f"no difference between {ours} and {theirs} beyond noise"
        by = sorted(abs(end - 1) for end in (self.low, self.high))
        how = "faster" if self.point > 1 else "slower"
        return f"{ours} is {how} than {theirs} by {abs(self.point - 1):.1%} ({by[0]:.1%} to {by[1]:.1%})"

    def __str__(self) -> str:
        return f"{self.point:.3f} ({self.low:.3f}-{self.high:.3f})"


def rate_ratio(first: Sequence[float], second: Sequence[float], *, point: float) -> Estimate | None:
    """The interval around ``point``, the second window's rate by the first's, from samples of their rates.

    None where a window has too few samples, or stood still.
    """
    errors = [_relative_error(rates) for rates in (first, second)]
    (one, freedom_one), (other, freedom_other) = (each or (math.nan, 1) for each in errors)
    variance = one + other
    if math.isnan(variance) or point <= 0.0:
        return None
    half = 0.0
    if variance:
        freedom = variance**2 / (one**2 / freedom_one + other**2 / freedom_other)  # Welch, Satterthwaite
        half = _student(freedom) * math.sqrt(variance)
    return Estimate(point, point * math.exp(-half), point * math.exp(half))


def _relative_error(rates: Sequence[float]) -> tuple[float, int] | None:
    """Variance of the logarithm of the mean rate, and its degrees of freedom."""
    count = len(rates)
    if count < FEWEST_BATCHES or not (mean := statistics.fmean(rates)):
        return None
    length = min(_batch_length(rates), count // FEWEST_BATCHES)
    batches = count // length
    skipped = count - batches * length  # at the start, where a window gets under way
    means = [statistics.fmean(rates[at : at + length]) for at in range(skipped, count, length)]
    return statistics.variance(means) / batches / mean**2, batches - 1


def _batch_length(rates: Sequence[float]) -> int:
    count, mean = len(rates), statistics.fmean(rates)
    off = [rate - mean for rate in rates]
    square = sum(each * each for each in off)
    if not square:
        return 1
    alike = sum(one * other for one, other in itertools.pairwise(off)) / square
    alike += (1 + 4 * alike) / count  # what is estimated of few samples is too low by that (Kendall, 1954)
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    return max(1, math.ceil(math.cbrt((2 * alike / (1 - alike**2)) ** 2 * count)))


def _student(freedom: float) -> float:
    """The 97.5th percentile of Student's t, by its expansion around the normal one (Abramowitz and Stegun 26.7.5)."""
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
