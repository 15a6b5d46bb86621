"""Every side once per round, so that what swings meets all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Found = TypeVar("Found")


def take_turns(rounds: int, sides: Mapping[str, Callable[[], Found]]) -> dict[str, list[Found]]:
    """Run every side once per round. Who goes first rotates; a first round is dropped."""
    names = list(sides)
    readings: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            reading = sides[name]()
            if number:
                readings[name].append(reading)
    return readings
