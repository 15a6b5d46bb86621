"""The definition of a metric: its name, help text, labels, and how it reads its subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Histogram:
    """``below[i]`` of ``count`` observations were below ``bounds[i]``, which has the spelling of the label."""

    bounds: Sequence[str]
    below: Sequence[int]
    count: int
    sum: float


# By label values; None means unknown. The value of an info is a mapping of further labels.
Values = Mapping[tuple[str, ...], float | Histogram | Mapping[str, str] | None]


@dataclass(frozen=True)
class Family(Generic[Subject]):
    """One metric, with its name in queries. ``labels`` follow those of the subject: a run, or a run and a rank."""

    kind: Literal["gauge", "counter", "info", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Subject], Values]

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty for a plain number."""
        base = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes", "ratio") if base.endswith("_" + unit)), "")


def gauge(name: str, text: str, read: Callable[[Subject], float | None]) -> Family[Subject]:
    """A metric without further labels."""
    return Family("gauge", name, text, (), lambda subject: {(): read(subject)})


def counter(name: str, text: str, read: Callable[[Subject], float]) -> Family[Subject]:
    """A metric without further labels."""
    return Family("counter", name, text, (), lambda subject: {(): read(subject)})
