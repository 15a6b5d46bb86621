"""Cross products of test parameters that are too many for every run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*axes: Iterable[Any], one_in: int = 2) -> list[Any]:
    """All combinations of the axes' values, for ``parametrize``: one of ``one_in`` is fast, the others are slow tests.

    A combination is fast if the sum of its indices on the axes is a multiple of ``one_in``. So each value of each axis
    occurs in a fast test, and adjacent values are combined with different values of the next axis.
    """
    cases = []
    for entries in product(*(list(enumerate(axis)) for axis in axes)):
        fast = sum(index for index, _ in entries) % one_in == 0
        cases.append(pytest.param(*(value for _, value in entries), marks=[] if fast else [pytest.mark.slow]))
    return cases
