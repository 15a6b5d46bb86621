"""Cross products of what a test is tried with, too many for every run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def crossed(*axes: Iterable[Any], one_in: int = 2) -> list[Any]:
    """All combinations of the axes' values, for ``parametrize``: one in so many is a fast test, the others are slow.

    They are dealt like cards: fast is whose places on the axes add up to a multiple of ``one_in``. So each value of any
    axis is tried in the fast tests, with other values of the next axis than its neighbours.
    """
    cases = []
    for places in product(*(list(enumerate(axis)) for axis in axes)):
        fast = sum(place for place, _ in places) % one_in == 0
        cases.append(pytest.param(*(value for _, value in places), marks=[] if fast else [pytest.mark.slow]))
    return cases
