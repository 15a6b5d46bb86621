"""Groups of one kind, which are counted together: what is true of a group is computed once for its kind. Pure.

A large model has many thousands of groups of a few kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Kinds(Generic[T]):
    """The kinds of ``groups``, those with equal ``marks``; ``of`` is the number of each group's kind."""

    def __init__(self, groups: Sequence[T], marks: Iterable[Hashable]) -> None:
        self._groups = groups
        numbers: dict[Hashable, int] = {}
        self.of = tuple(numbers.setdefault(mark, len(numbers)) for mark in marks)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The index of the first group of each kind."""
        firsts: dict[int, int] = {}
        for at, kind in enumerate(self.of):
            firsts.setdefault(kind, at)
        return tuple(firsts.values())

    @cached_property
    def alike(self) -> tuple[tuple[T, int], ...]:
        """The first group of each kind, and the number of groups of that kind."""
        return tuple((group, count) for group, _, count in self.counted())

    def counted(self, *values: Sequence[U]) -> Iterator[tuple[T, tuple[U, ...], int]]:
        """The first group of each kind with what its groups have of ``values``, and how many of them have the same."""
        counts: Counter[tuple[Any, ...]] = Counter(zip(self.of, *values, strict=True))
        for (kind, *own), count in counts.items():
            yield self._groups[self.firsts[kind]], tuple(own), count

    def spread(self, values: Sequence[U]) -> tuple[U, ...]:
        """For each group the one of ``values``, of the kinds, that is its kind's."""
        return tuple(map(values.__getitem__, self.of))
