"""What was measured: rows of milliseconds, round by round, and the parts of a run that they belong to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiering.tierbench.ratios import take_turns

SETTLE = 0.02
"""Seconds of sleep before each reading. Idle OpenMP threads spin for some milliseconds after their work."""

ROOF = "roof"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to time: ``run`` returns milliseconds in which ``numel`` parameters of ``nbytes`` bytes each passed.

    ``isa`` is the instruction set it is forced to, for our kernels.
    """

    name: str
    nbytes: int
    numel: int
    run: Callable[[], float]
    isa: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """A row after its rounds: ``ms[i]`` is of round i. ``nbytes`` is per parameter; 0 where bytes say nothing."""

    name: str
    nbytes: int
    numel: int
    ms: tuple[float, ...]
    isa: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.isa}" if self.isa else self.name

    @property
    def rates(self) -> list[float]:
        """Parameters per millisecond, by round."""
        return [self.numel / ms for ms in self.ms]

    @property
    def gb_per_s(self) -> list[float]:
        return [self.nbytes * self.numel / ms / 1e6 for ms in self.ms]


@dataclass(slots=True)
class Part:
    """One part of the run: rows that took turns. ``first_isa`` is what our goals are judged by."""

    name: str
    title: str
    threads: int
    first_isa: str
    rows: list[Readings]
    notes: list[str] = field(default_factory=list)

    def find(self, name: str, isa: str = "") -> Readings | None:
        return next((row for row in self.rows if (row.name, row.isa) == (name, isa)), None)

    def ours(self, name: str) -> Readings | None:
        """The row of that name, with the first instruction set if it is forced to one."""
        return self.find(name, self.first_isa) or self.find(name)


def timed(work: Callable[[], object]) -> Callable[[], float]:
    """Sleeps a little, then does ``work``; returns the milliseconds of the latter."""

    def run() -> float:
        time.sleep(SETTLE)
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)

    return run


def measure(rounds: int, rows: Sequence[Row]) -> list[Readings]:
    """Every row once per round."""
    rows_by_key = {(row.name, row.isa): row for row in rows}
    assert len(rows_by_key) == len(rows), "two rows of one name"
    times = take_turns(rounds, {f"{name}|{isa}": row.run for (name, isa), row in rows_by_key.items()})
    return [
        Readings(row.name, row.nbytes, row.numel, tuple(times[f"{name}|{isa}"]), isa)
        for (name, isa), row in rows_by_key.items()
    ]
