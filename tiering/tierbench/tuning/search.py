"""The search for settings that suit a drive: chooses the next measurements and evaluates the readings. Pure.

The rate of a disk can change by a factor of two within minutes, so a setting is not judged by its rate. Each setting is
measured between two measurements of the reference, the engine's defaults, and its ratio to them counts. If the two
references differ much, the drive changed meanwhile; if one of them is almost zero, the drive stalled. Such a reading
never counts, and its setting is measured again. A setting's confidence interval comes from the scatter of all ratios
around the medians of their settings, because three readings of one setting alone would say little.

The search starts with a coarse grid. Each later round measures again the better half of the settings that may be the
best, and the neighbours of the leader. It ends when no further reading could change the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tiering.tierbench.result import ResultPart
from tiering.tierbench.spread import Estimate
from tiering.tierbench.words import brief

EQUAL_SHARE = 0.05  # settings whose rates differ by no more are equally fast
MIN_READINGS = 3  # readings that a recommendation needs
NOISY = 0.07  # noise beyond which that is too few: where others load a machine, two of three are often wrong together
MIN_READINGS_IF_NOISY = 5
MAX_READINGS = 16  # readings of a setting; more would add little
MAX_IN_FLIGHT = 64 << 20  # bytes: rate times latency, enough for 10 GB/s at 6 ms
_DISTURBED_RATIO = 1.3  # of the two references around a reading
_MAX_ATTEMPTS = 3  # readings of a setting without a valid one
_STALL_SHARE = 0.05  # of the median reference: one below that is none, for the drive stood still
_DEVIATIONS = 1.96  # 95 %
_REQUIRED_DEVIATIONS = 3.0  # standard deviations; among thirty equal settings, one exceeds two by chance
_MEDIAN_FACTOR = 1.25  # sqrt(pi / 2): how much more medians scatter than means
_MIN_NOISE = 0.002
_INITIAL_NOISE = math.log(2)  # before there is a scatter: disks vary by a factor of two
_MIN_SURVIVORS = 4
_SMALL_GRID = 20  # settings: as many as are begun with on a large grid


class Cell(NamedTuple):
    """A setting."""

    ioengine: str
    bs: int
    iodepth: int
    registered: bool

    @property
    def in_flight(self) -> int:
        """Bytes, per directory."""
        return self.bs * self.iodepth

    def __str__(self) -> str:
        loose = "" if self.registered else ", not registered"
        return f"{self.ioengine} {brief(self.bs)} x {self.iodepth}{loose}"


class Reading(ResultPart):
    """A measurement of a setting, with the references before and after. Rates are bytes per second, times seconds."""

    at: float
    rate: float
    cpu_per_gb: float
    p99: float
    before: float
    """Rate of the reference."""
    after: float

    @property
    def ratio(self) -> float:
        return self.rate / math.sqrt(self.before * self.after)

    @property
    def is_disturbed(self) -> bool:
        """Whether the drive changed during the measurement."""
        return max(self.before, self.after) > _DISTURBED_RATIO * min(self.before, self.after)


@dataclass(frozen=True)
class Grid:
    """The settings to try. ``ways`` are the available engines, each with or without registered buffers."""

    reference: Cell
    ways: tuple[tuple[str, bool], ...]
    sizes: tuple[int, ...]
    depths: tuple[int, ...]

    def __iter__(self) -> Iterator[Cell]:
        for way, registered in self.ways:
            for bs in self.sizes:
                for depth in self.depths:
                    cell = Cell(way, bs, depth, registered)
                    if cell.in_flight <= MAX_IN_FLIGHT:
                        yield cell

    def excluded_count(self) -> int:
        """The number of settings that would have more than ``MAX_IN_FLIGHT`` bytes in flight."""
        return len(self.ways) * len(self.sizes) * len(self.depths) - sum(1 for _ in self)

    def start(self) -> list[Cell]:
        """The first round: a small grid as a whole; else the sizes and depths of the reference, and some others."""
        home = self.reference
        far = {
            (bs, depth)
            for bs, depth in (
                (self.sizes[min(1, len(self.sizes) - 1)], self.depths[max(0, len(self.depths) - 2)]),
                (self.sizes[max(0, len(self.sizes) - 2)], self.depths[min(1, len(self.depths) - 1)]),
            )
        }

        def begins(cell: Cell) -> bool:
            place = (cell.bs, cell.iodepth)
            if place in far or place == (home.bs, home.iodepth):
                return True
            at_home = (cell.ioengine, cell.registered) == (home.ioengine, home.registered)
            return at_home and (cell.bs == home.bs or cell.iodepth == home.iodepth)

        cells = [cell for cell in self if cell != home]
        return cells if len(cells) <= _SMALL_GRID else [cell for cell in cells if begins(cell)] or cells

    def neighbours(self, cell: Cell) -> list[Cell]:
        """The settings that are one step away in block size or depth, or differ in engine or registration only."""

        def near(candidate: Cell) -> bool:
            steps = _steps(self.sizes, cell.bs, candidate.bs) + _steps(
                self.depths, cell.iodepth, candidate.iodepth
            )
            is_same_engine = (cell.ioengine, cell.registered) == (candidate.ioengine, candidate.registered)
            return steps == 1 if is_same_engine else steps == 0

        return [candidate for candidate in self if near(candidate)]


def _steps(values: Sequence[int], first: int, second: int) -> int:
    """The distance of two values in steps; the reference's value need not be among ``values``."""
    between = abs(sum(value < first for value in values) - sum(value < second for value in values))
    return max(between, int(first != second))


@dataclass(frozen=True)
class Standing:
    """The medians of a setting's valid readings. ``ratio`` is its rate divided by the reference's."""

    cell: Cell
    readings: int
    ratio: Estimate
    rate: float
    cpu_per_gb: float
    p99: float

    def beats(self, other: Standing) -> bool:
        """Whether it is better in rate, CPU time or memory, and not worse in any of them."""
        own_cost = (-self.ratio.point, self.cpu_per_gb, self.cell.in_flight)
        other_cost = (-other.ratio.point, other.cpu_per_gb, other.cell.in_flight)
        return own_cost != other_cost and all(
            our <= their for our, their in zip(own_cost, other_cost, strict=True)
        )


@dataclass(frozen=True)
class TuningVerdict:
    """The recommendation and its reason. ``standings`` are best first; ``noise`` is the scatter of single ratios."""

    standings: tuple[Standing, ...]
    reference: Standing
    recommended: Standing
    why: str
    noise: float

    @property
    def best(self) -> Standing:
        return _best(self.standings, self.reference)

    @property
    def keeps_defaults(self) -> bool:
        """Whether the defaults are recommended."""
        return self.recommended is self.reference

    @property
    def alike(self) -> tuple[Standing, ...]:
        """The settings that are as fast as the best."""
        return tuple(each for each in self.standings if _is_as_fast(each, self.best))

    @property
    def front(self) -> tuple[Standing, ...]:
        """The settings that no other setting beats."""
        return tuple(
            each for each in self.standings if not any(other.beats(each) for other in self.standings)
        )

    def flat(self, along: Literal["bs", "iodepth"]) -> tuple[int, int]:
        """The range of ``along`` around the recommended setting in which the rate equals the best."""
        home = self.recommended.cell

        def on_line(cell: Cell) -> bool:
            fixed_names = ("ioengine", "registered", "bs" if along == "iodepth" else "iodepth")
            return all(getattr(cell, name) == getattr(home, name) for name in fixed_names)

        line = {getattr(each.cell, along): each for each in self.standings if on_line(each.cell)}
        at = getattr(home, along)
        lowest = high = at
        for value in sorted(value for value in line if value > at):
            if not _is_as_fast(line[value], self.best):
                break
            high = value
        for value in sorted((value for value in line if value < at), reverse=True):
            if not _is_as_fast(line[value], self.best):
                break
            lowest = value
        return lowest, high


@dataclass
class Sweep:
    """The readings so far, those of the reference in order, and the settings that cannot be measured here."""

    grid: Grid
    readings: dict[Cell, list[Reading]] = field(default_factory=dict)
    reference: list[Reading] = field(default_factory=list)
    left_out: dict[Cell, str] = field(default_factory=dict)
    rounds: int = 0

    def add(self, cell: Cell, reading: Reading) -> None:
        self.readings.setdefault(cell, []).append(reading)

    def leave_out(self, cell: Cell, reason: str) -> None:
        """Exclude a setting from further measurement, and drop its readings."""
        self.left_out[cell] = reason
        self.readings.pop(cell, None)

    def next_round(self) -> list[Cell]:
        """The settings to measure next, the most promising first; an empty list ends the search."""
        self.rounds += 1
        if self.rounds == 1:
            return self.grid.start()
        standings, home = self.standings(), self.reference_standing()
        leader = max((*standings, home), key=lambda each: each.ratio.point)
        contenders = [each for each in standings if self._needs_readings(each, leader)]
        contenders.sort(key=lambda each: -each.ratio.high)
        survivors = [each.cell for each in contenders[: max(_MIN_SURVIVORS, -(-len(contenders) // 2))]]
        measured = {self.grid.reference, *self.readings, *self.left_out}
        undecided = [
            cell for cell in self.cells_without_reading() if len(self.readings[cell]) < _MAX_ATTEMPTS
        ]
        neighbours = [cell for cell in self.grid.neighbours(leader.cell) if cell not in measured]
        return survivors + undecided + neighbours

    def valid_readings(self, cell: Cell) -> list[Reading]:
        """The readings of a setting during which the drive neither changed nor stalled."""
        return [each for each in self._readings_without_stall(cell) if not each.is_disturbed]

    def _readings_without_stall(self, cell: Cell) -> list[Reading]:
        """The readings of a setting during which the drive did not stall."""
        stall_rate = _STALL_SHARE * statistics.median(each.rate for each in self.reference)
        return [each for each in self.readings[cell] if min(each.before, each.after) >= stall_rate]

    def cells_without_reading(self) -> list[Cell]:
        """The settings without a valid reading."""
        return [cell for cell in self.readings if not self.valid_readings(cell)]

    def _needs_readings(self, standing: Standing, leader: Standing) -> bool:
        """Whether more readings could change the result: the setting may be the best, and faster than the defaults."""
        if standing.readings >= MAX_READINGS or standing.ratio.high < max(leader.ratio.low, 1 + EQUAL_SHARE):
            return False
        return (
            standing.readings < MIN_READINGS
            or math.log(standing.ratio.high / standing.ratio.low) > EQUAL_SHARE
        )

    def noise(self) -> float:
        """Robust standard deviation of the logarithm of a single ratio, over all settings."""
        scatter = []
        # Each reference in the middle is treated as a setting.
        for before, rate, after in zip(self.reference, self.reference[1:], self.reference[2:], strict=False):
            scatter.append(math.log(rate.rate / math.sqrt(before.rate * after.rate)))
        for cell in self.readings:
            logs = [
                math.log(each.ratio)
                for each in self.valid_readings(cell) or self._readings_without_stall(cell)
            ]
            if len(logs) > 1:
                # The median is estimated from the same readings, which makes their deviations too small.
                correction = math.sqrt(len(logs) / (len(logs) - 1))
                scatter += [(each - statistics.median(logs)) * correction for each in logs]
        deviation = 1.4826 * statistics.median(map(abs, scatter)) if scatter else _INITIAL_NOISE
        return max(_MIN_NOISE, deviation)

    def standings(self) -> list[Standing]:
        """The standings of all settings but the reference, best first."""
        noise = self.noise()
        readings_by_cell = {cell: self.valid_readings(cell) for cell in self.readings}
        standings = [
            _standing(cell, readings, noise) for cell, readings in readings_by_cell.items() if readings
        ]
        return sorted(standings, key=lambda each: -each.ratio.point)

    def reference_standing(self) -> Standing:
        """The standing of the reference; its ratio is 1 by definition."""
        return Standing(
            self.grid.reference,
            readings=len(self.reference),
            ratio=Estimate(1.0, 1.0, 1.0),
            rate=statistics.median(each.rate for each in self.reference),
            cpu_per_gb=statistics.median(each.cpu_per_gb for each in self.reference),
            p99=statistics.median(each.p99 for each in self.reference),
        )

    def verdict(self) -> TuningVerdict:
        """The recommendation from the readings so far: the defaults, unless another setting is clearly faster."""
        home, noise = self.reference_standing(), self.noise()
        min_readings = MIN_READINGS if noise <= NOISY else MIN_READINGS_IF_NOISY
        standings = tuple(sorted((*self.standings(), home), key=lambda each: -each.ratio.point))
        best = _best(standings, home)
        faster = [
            each
            for each in standings
            if each is not home and each.readings >= min_readings and _is_faster(each)
        ]
        if not faster:
            return TuningVerdict(
                standings, home, home, _reason_for_defaults(best, home, standings, min_readings), noise
            )
        as_fast = [
            each for each in faster if _is_as_fast(each, faster[0]) or _is_within_noise(each, faster[0])
        ]
        chosen = _cheapest(as_fast, home.cell)
        reason = (
            f"its rate is {_times(chosen)} that of the defaults ({chosen.ratio.low:.2f} to"
            f" {chosen.ratio.high:.2f})"
        )
        if len(as_fast) > 1:
            reason += (
                f"; of {len(as_fast)} settings that are as fast, it takes the least CPU time, then memory"
            )
        return TuningVerdict(standings, home, chosen, reason, noise)


def _standing(cell: Cell, readings: Sequence[Reading], noise: float) -> Standing:
    middle = statistics.median(math.log(each.ratio) for each in readings)
    half = _DEVIATIONS * noise * (_MEDIAN_FACTOR if len(readings) > 2 else 1.0) / math.sqrt(len(readings))
    return Standing(
        cell,
        readings=len(readings),
        ratio=Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half)),
        rate=statistics.median(each.rate for each in readings),
        cpu_per_gb=statistics.median(each.cpu_per_gb for each in readings),
        p99=statistics.median(each.p99 for each in readings),
    )


def _best(standings: Iterable[Standing], home: Standing) -> Standing:
    """The fastest setting with enough readings; the rate of one or two readings may be chance."""
    sure = [each for each in standings if each.readings >= MIN_READINGS]
    return max((*sure, home), key=lambda each: each.ratio.point)


def _is_faster(standing: Standing) -> bool:
    """Whether it is faster than the defaults, beyond noise and by enough to matter."""
    surely = standing.ratio.point * (standing.ratio.low / standing.ratio.point) ** (
        _REQUIRED_DEVIATIONS / _DEVIATIONS
    )
    return surely > 1.0 and standing.ratio.point > 1 + EQUAL_SHARE


def _is_as_fast(standing: Standing, best: Standing) -> bool:
    return standing.ratio.point >= (1 - EQUAL_SHARE) * best.ratio.point


def _is_within_noise(first: Standing, second: Standing) -> bool:
    """Whether noise alone could explain their difference."""
    widths = [math.log(each.ratio.high / each.ratio.point) for each in (first, second)]
    return abs(math.log(first.ratio.point / second.ratio.point)) <= math.hypot(*widths)


def _cheapest(standings: Sequence[Standing], home: Cell) -> Standing:
    """The setting with the least CPU per byte; among those within a tenth, the least memory, then ``home``'s engine."""
    lowest_cost = min(each.cpu_per_gb for each in standings)
    cheap = [each for each in standings if each.cpu_per_gb <= 1.1 * lowest_cost]
    return min(cheap, key=lambda each: (each.cell.in_flight, each.cell.ioengine != home.ioengine))


def _reason_for_defaults(
    best: Standing, home: Standing, standings: Sequence[Standing], min_readings: int
) -> str:
    candidates = [
        each for each in standings if each.readings < min_readings and each.ratio.point > 1 + EQUAL_SHARE
    ]
    if candidates and (best.ratio.point <= 1 + EQUAL_SHARE or best in candidates):
        return (
            f"{candidates[0].cell} looked faster, but was measured fewer than {min_readings} times;"
            " give a longer --runtime"
        )
    if best is home:
        return "no setting is faster"
    comparison = (
        f"the rate of {best.cell} is {_times(best)} that of the defaults ({best.ratio.low:.2f} to"
        f" {best.ratio.high:.2f})"
    )
    return f"{comparison}, " + (
        "too little to matter" if best.ratio.point <= 1 + EQUAL_SHARE else "which is within noise"
    )


def _times(standing: Standing) -> str:
    return f"{standing.ratio.point:.2f} times"


def pairs(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Groups of two settings, to measure between two references, so that each has a reference next to it."""
    for at in range(0, len(cells), 2):
        yield cells[at : at + 2]
