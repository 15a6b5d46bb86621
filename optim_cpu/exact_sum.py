"""Sums of float64 numbers without rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from optim_cpu._kernels import lib

LIMBS: int = lib.OPT_SUM_LIMBS
LIMB_BITS = 32
UNIT = 1 << 320


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum of float64 numbers of at least 0: its value does not depend on their order.

    ``units`` counts 2^-320, ``infinite`` and ``nan`` the numbers that are not finite.
    """

    units: int = 0
    infinite: int = 0
    nan: int = 0

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.infinite + other.infinite, self.nan + other.nan)

    def __float__(self) -> float:
        """The nearest float64; NaN or infinity if a number was not finite."""
        if not self.is_finite:
            return math.nan if self.nan else math.inf
        return self.units / UNIT

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return not self.infinite and not self.nan

    @classmethod
    def total(cls, sums: Iterable[ExactSum]) -> ExactSum:
        """The sum of ``sums``."""
        return sum(sums, start=cls())

    def limbs(self) -> list[int]:
        """The sum as LIMBS integers of at most 53 bits, which float64 holds exactly, as kernels.h defines them."""
        last = LIMBS - 3
        values = [self.units >> LIMB_BITS * limb & 0xFFFFFFFF for limb in range(last)]
        return [*values, self.units >> LIMB_BITS * last, self.infinite, self.nan]

    @classmethod
    def of_limbs(cls, limbs: Sequence[float]) -> ExactSum:
        """The inverse of ``limbs``."""
        *values, infinite, nan = map(int, limbs)
        return cls(sum(value << LIMB_BITS * place for place, value in enumerate(values)), infinite, nan)
