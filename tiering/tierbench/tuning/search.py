"""Which settings suit a drive: which to measure next, and what the readings say. Pure: cells and readings in.

Disks swing twofold within minutes, so no setting is judged by its rate: each is measured between two windows of the
reference, the engine's defaults, and what counts is the ratio to them. Where those two differ by much the drive has
changed meanwhile, and where one of them moved next to nothing the drive stood still: such a reading never counts, and
its setting is measured again. A setting's interval comes from the scatter of all ratios around their settings' medians:
three readings of one alone would say little.

Where to look: a coarse grid first, then in rounds the better half of what may still be best, measured again, and the
neighbours of the leader. It is over when nothing left could matter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tiering.tierbench.result import Record
from tiering.tierbench.spread import Estimate
from tiering.tierbench.words import brief

SAME = 0.05  # settings whose rates differ by no more than that are the same
FEWEST = 3  # readings that a recommendation takes
NOISY = 0.07  # noise beyond which that is too few: where others load a machine, two of three are often wrong together
FEWEST_IF_NOISY = 5
MOST = 16  # readings of a setting: more would show little
MOST_IN_FLIGHT = 64 << 20  # bytes: rate times latency, so enough for 10 GB/s at 6 ms
_DISTURBED = 1.3  # ratio of the references around a reading
_AGAIN = 3  # windows of a setting of which none counts
_STILL = 0.05  # of the median reference: one below that is none, for the drive stood still
_DEVIATIONS = 1.96  # 95 %
_SURE = 3.0  # deviations: of thirty settings that are all the same, one is beyond two by luck
_OF_MEDIANS = 1.25  # sqrt(pi / 2): how much more medians scatter than means
_LEAST_NOISE = 0.002
_UNKNOWN_NOISE = math.log(2)  # until there is a scatter: disks swing twofold
_LEAST_SURVIVORS = 4
_FEW = 20  # settings: as many as are begun with on a large grid


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


class Reading(Record):
    """A window of a setting, and the reference beside it. Rates are bytes per second, times seconds."""

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
    def disturbed(self) -> bool:
        """Whether the drive changed while it was measured."""
        return max(self.before, self.after) > _DISTURBED * min(self.before, self.after)


@dataclass(frozen=True)
class Grid:
    """What is swept. ``ways`` are engines, each with or without registered buffers, as it can have them."""

    reference: Cell
    ways: tuple[tuple[str, bool], ...]
    sizes: tuple[int, ...]
    depths: tuple[int, ...]

    def __iter__(self) -> Iterator[Cell]:
        for way, registered in self.ways:
            for bs in self.sizes:
                for depth in self.depths:
                    cell = Cell(way, bs, depth, registered)
                    if cell.in_flight <= MOST_IN_FLIGHT:
                        yield cell

    def left_out(self) -> int:
        """Settings that would hold more than ``MOST_IN_FLIGHT``."""
        return len(self.ways) * len(self.sizes) * len(self.depths) - sum(1 for _ in self)

    def start(self) -> list[Cell]:
        """All if they are few; else block sizes and depths along the reference, and some of each way far from it."""
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
        return cells if len(cells) <= _FEW else [cell for cell in cells if begins(cell)] or cells

    def neighbours(self, cell: Cell) -> list[Cell]:
        """One step away in block size or depth, or another way."""

        def near(other: Cell) -> bool:
            steps = _steps(self.sizes, cell.bs, other.bs) + _steps(self.depths, cell.iodepth, other.iodepth)
            same_way = (cell.ioengine, cell.registered) == (other.ioengine, other.registered)
            return steps == 1 if same_way else steps == 0

        return [other for other in self if near(other)]


def _steps(values: Sequence[int], one: int, other: int) -> int:
    """How far apart they are; a reference need not be among the values."""
    between = abs(sum(value < one for value in values) - sum(value < other for value in values))
    return max(between, int(one != other))


@dataclass(frozen=True)
class Standing:
    """What is known of a setting: medians of its readings that count. ``ratio`` is to the reference's rate."""

    cell: Cell
    readings: int
    ratio: Estimate
    rate: float
    cpu_per_gb: float
    p99: float

    def beats(self, other: Standing) -> bool:
        """Whether it is at least as good in all that a table shows."""
        ours = (-self.ratio.point, self.cpu_per_gb, self.cell.in_flight)
        theirs = (-other.ratio.point, other.cpu_per_gb, other.cell.in_flight)
        return ours != theirs and all(our <= their for our, their in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Verdict:
    """What to use, and why. ``standings`` are best first; ``noise`` is the scatter of single ratios."""

    standings: tuple[Standing, ...]
    reference: Standing
    recommended: Standing
    why: str
    noise: float

    @property
    def best(self) -> Standing:
        return _best(self.standings, self.reference)

    @property
    def kept(self) -> bool:
        """Whether the defaults are recommended."""
        return self.recommended is self.reference

    @property
    def alike(self) -> tuple[Standing, ...]:
        """Those that are as fast as the best."""
        return tuple(each for each in self.standings if _same(each, self.best))

    @property
    def front(self) -> tuple[Standing, ...]:
        """Those that no other beats."""
        return tuple(
            each for each in self.standings if not any(other.beats(each) for other in self.standings)
        )

    def flat(self, along: Literal["bs", "iodepth"]) -> tuple[int, int]:
        """From where to where the rate is as good as the best's, from what is recommended on, in one direction."""
        home = self.recommended.cell

        def on_line(cell: Cell) -> bool:
            rest = ("ioengine", "registered", "bs" if along == "iodepth" else "iodepth")
            return all(getattr(cell, name) == getattr(home, name) for name in rest)

        line = {getattr(each.cell, along): each for each in self.standings if on_line(each.cell)}
        at = getattr(home, along)
        low = high = at
        for value in sorted(value for value in line if value > at):
            if not _same(line[value], self.best):
                break
            high = value
        for value in sorted((value for value in line if value < at), reverse=True):
            if not _same(line[value], self.best):
                break
            low = value
        return low, high


@dataclass
class Sweep:
    """Readings so far, those of the reference in their order, and what cannot be measured here."""

    grid: Grid
    readings: dict[Cell, list[Reading]] = field(default_factory=dict)
    reference: list[Reading] = field(default_factory=list)
    left_out: dict[Cell, str] = field(default_factory=dict)
    rounds: int = 0

    def add(self, cell: Cell, reading: Reading) -> None:
        self.readings.setdefault(cell, []).append(reading)

    def leave_out(self, cell: Cell, why: str) -> None:
        """Never measure it again, and forget what was."""
        self.left_out[cell] = why
        self.readings.pop(cell, None)

    def next_round(self) -> list[Cell]:
        """What to measure next, the most promising first; nothing: it is over."""
        self.rounds += 1
        if self.rounds == 1:
            return self.grid.start()
        standings, home = self.standings(), self.home()
        leader = max((*standings, home), key=lambda each: each.ratio.point)
        contenders = [each for each in standings if self._matters(each, leader)]
        contenders.sort(key=lambda each: -each.ratio.high)
        survivors = [each.cell for each in contenders[: max(_LEAST_SURVIVORS, -(-len(contenders) // 2))]]
        known = {self.grid.reference, *self.readings, *self.left_out}
        again = [cell for cell in self.unknown() if len(self.readings[cell]) < _AGAIN]
        neighbours = [cell for cell in self.grid.neighbours(leader.cell) if cell not in known]
        return survivors + again + neighbours

    def counted(self, cell: Cell) -> list[Reading]:
        """The readings of a setting that count: the drive neither changed nor stood still meanwhile."""
        return [each for each in self._moving(cell) if not each.disturbed]

    def _moving(self, cell: Cell) -> list[Reading]:
        """Those beside which the drive did not stand still."""
        still = _STILL * statistics.median(each.rate for each in self.reference)
        return [each for each in self.readings[cell] if min(each.before, each.after) >= still]

    def unknown(self) -> list[Cell]:
        """Settings of which no reading counts."""
        return [cell for cell in self.readings if not self.counted(cell)]

    def _matters(self, standing: Standing, leader: Standing) -> bool:
        """Whether more readings could change what is recommended: it may be the best, and better than the defaults."""
        if standing.readings >= MOST or standing.ratio.high < max(leader.ratio.low, 1 + SAME):
            return False
        return standing.readings < FEWEST or math.log(standing.ratio.high / standing.ratio.low) > SAME

    def noise(self) -> float:
        """Scatter of the logarithm of a single ratio: robust, of all settings together."""
        scatter = []
        # Each reference in the middle is treated as a setting.
        for before, rate, after in zip(self.reference, self.reference[1:], self.reference[2:], strict=False):
            scatter.append(math.log(rate.rate / math.sqrt(before.rate * after.rate)))
        for cell in self.readings:
            logs = [math.log(each.ratio) for each in self.counted(cell) or self._moving(cell)]
            if len(logs) > 1:
                widened = math.sqrt(len(logs) / (len(logs) - 1))  # the median lies amid them
                scatter += [(each - statistics.median(logs)) * widened for each in logs]
        deviation = 1.4826 * statistics.median(map(abs, scatter)) if scatter else _UNKNOWN_NOISE
        return max(_LEAST_NOISE, deviation)

    def standings(self) -> list[Standing]:
        """Best first, without the reference."""
        noise = self.noise()
        counted = {cell: self.counted(cell) for cell in self.readings}
        found = [_standing(cell, readings, noise) for cell, readings in counted.items() if readings]
        return sorted(found, key=lambda each: -each.ratio.point)

    def home(self) -> Standing:
        """The reference's, to which ratios are taken: of itself 1."""
        return Standing(
            self.grid.reference,
            readings=len(self.reference),
            ratio=Estimate(1.0, 1.0, 1.0),
            rate=statistics.median(each.rate for each in self.reference),
            cpu_per_gb=statistics.median(each.cpu_per_gb for each in self.reference),
            p99=statistics.median(each.p99 for each in self.reference),
        )

    def verdict(self) -> Verdict:
        """What to use by what is known so far: the defaults, unless another setting is faster beyond doubt."""
        home, noise = self.home(), self.noise()
        fewest = FEWEST if noise <= NOISY else FEWEST_IF_NOISY
        standings = tuple(sorted((*self.standings(), home), key=lambda each: -each.ratio.point))
        best = _best(standings, home)
        faster = [
            each
            for each in standings
            if each is not home and each.readings >= fewest and _surely_faster(each)
        ]
        if not faster:
            return Verdict(standings, home, home, _why_kept(best, home, standings, fewest), noise)
        as_fast = [each for each in faster if _same(each, faster[0]) or _tied(each, faster[0])]
        chosen = _cheapest(as_fast, home.cell)
        why = (
            f"it moves {_times(chosen)} what the defaults do ({chosen.ratio.low:.2f} to"
            f" {chosen.ratio.high:.2f})"
        )
        if len(as_fast) > 1:
            why += f"; of the {len(as_fast)} that are as fast it takes the least CPU, then memory"
        return Verdict(standings, home, chosen, why, noise)


def _standing(cell: Cell, readings: Sequence[Reading], noise: float) -> Standing:
    middle = statistics.median(math.log(each.ratio) for each in readings)
    half = _DEVIATIONS * noise * (_OF_MEDIANS if len(readings) > 2 else 1.0) / math.sqrt(len(readings))
    return Standing(
        cell,
        readings=len(readings),
        ratio=Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half)),
        rate=statistics.median(each.rate for each in readings),
        cpu_per_gb=statistics.median(each.cpu_per_gb for each in readings),
        p99=statistics.median(each.p99 for each in readings),
    )


def _best(standings: Iterable[Standing], home: Standing) -> Standing:
    """The fastest; of one that was measured once or twice the rate may be luck."""
    sure = [each for each in standings if each.readings >= FEWEST]
    return max((*sure, home), key=lambda each: each.ratio.point)


def _surely_faster(standing: Standing) -> bool:
    """Than the defaults: beyond noise, and by enough to matter."""
    surely = standing.ratio.point * (standing.ratio.low / standing.ratio.point) ** (_SURE / _DEVIATIONS)
    return surely > 1.0 and standing.ratio.point > 1 + SAME


def _same(standing: Standing, best: Standing) -> bool:
    return standing.ratio.point >= (1 - SAME) * best.ratio.point


def _tied(one: Standing, other: Standing) -> bool:
    """Whether noise alone could be what sets them apart."""
    widths = [math.log(each.ratio.high / each.ratio.point) for each in (one, other)]
    return abs(math.log(one.ratio.point / other.ratio.point)) <= math.hypot(*widths)


def _cheapest(standings: Sequence[Standing], home: Cell) -> Standing:
    """The least CPU per byte; where that differs by a tenth or less, the least memory, then the engine of ``home``."""
    least = min(each.cpu_per_gb for each in standings)
    cheap = [each for each in standings if each.cpu_per_gb <= 1.1 * least]
    return min(cheap, key=lambda each: (each.cell.in_flight, each.cell.ioengine != home.ioengine))


def _why_kept(best: Standing, home: Standing, standings: Sequence[Standing], fewest: int) -> str:
    hopes = [each for each in standings if each.readings < fewest and each.ratio.point > 1 + SAME]
    if hopes and (best.ratio.point <= 1 + SAME or best in hopes):
        return f"{hopes[0].cell} looked faster, but was measured less than {fewest} times; a longer --runtime tells"
    if best is home:
        return "no setting is faster"
    what = f"{best.cell} moves {_times(best)} what they do ({best.ratio.low:.2f} to {best.ratio.high:.2f})"
    return f"{what}, " + ("too little to matter" if best.ratio.point <= 1 + SAME else "which is within noise")


def _times(standing: Standing) -> str:
    return f"{standing.ratio.point:.2f} times"


def pairs(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Between two windows of the reference there are two settings: each has one beside it."""
    for at in range(0, len(cells), 2):
        yield cells[at : at + 2]
