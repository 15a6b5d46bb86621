"""What must be reached, in one place, and how it is judged: by the median of the rounds' ratios.

The bytes behind a byte ratio are those that the rows really moved, not numbers written here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from frame.report import Verdict

from tiering.tierbench.ratios import compare
from tiering.tierbench.spread import Estimate

from . import many, start
from .readings import ROOF, Part, Readings
from .steps import PEERS, peer_step, peer_whole


@dataclass(frozen=True, slots=True)
class Goal:
    """Our ``row`` is to be at least ``at_least`` times as fast as row ``against``, in parameters per second.

    ``per_byte``: times the ratio of their bytes per parameter. Against the roof that is a fraction of its GB/s.
    """

    row: str
    against: str
    at_least: float
    per_byte: bool = False


BF16_MOMENTS = ("bf16 moments", "bf16 moments, stochastic")
SPLIT_BF16 = ("split + bf16 moments", "split + bf16 moments, stochastic")

STEP_GOALS = (
    *(Goal("fp32", peer_step(peer), 1.0) for peer in PEERS),
    Goal("fp32", ROOF, 0.95, per_byte=True),
    *(Goal("bf16 in/out", peer_whole(peer), 0.95, per_byte=True) for peer in PEERS),
    Goal("bf16 in/out", ROOF, 0.95, per_byte=True),
    *(Goal(row, peer_whole(peer), 1.9) for row in BF16_MOMENTS for peer in PEERS),
    *(Goal(row, "bf16 in/out", 0.97, per_byte=True) for row in ("split", *SPLIT_BF16)),
)

AVX2_OF_AVX512 = 0.95
MEMORY_BOUND = 0.9
"""A row waits for memory if AVX-512 brings it to this fraction of the roof."""

MANY_GOALS = (Goal(many.OURS, many.TORCH, 1.5),)

MOST_START_MS = 300.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """A goal with its rounds: ``ours[i] / theirs[i]`` of rates is to have a median of ``at_least``."""

    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    at_least: float
    goal: str

    def ratio(self, rounds: Sequence[int] | None = None) -> Estimate:
        """The median, of all rounds or of those."""
        chosen = range(len(self.ours)) if rounds is None else rounds
        return compare([self.ours[i] for i in chosen], [self.theirs[i] for i in chosen]).median

    def verdict(self) -> Verdict:
        ratio = self.ratio()
        return Verdict(self.what, str(ratio), self.goal, ratio.point >= self.at_least)


def of_roof(row: Readings, roof: Readings) -> Estimate:
    """GB/s as a fraction of the roof's in the same round."""
    return compare(row.gb_per_s, roof.gb_per_s).median


def judge(goal: Goal, part: Part) -> Comparison | None:
    """None if one of the rows was not measured."""
    ours, theirs = part.ours(goal.row), part.find(goal.against) or part.ours(goal.against)
    if ours is None or theirs is None:
        return None
    if goal.against == ROOF:
        subject = f"{part.name}: {ours.name}, fraction of the roof"
        return Comparison(subject, ours.gb_per_s, theirs.gb_per_s, goal.at_least, f"at least {goal.at_least}")
    at_least, text = goal.at_least, f"at least {goal.at_least}"
    if goal.per_byte:
        at_least *= theirs.nbytes / ours.nbytes
        text = f"at least {at_least:.3f}, {goal.at_least} of {theirs.nbytes}/{ours.nbytes}"
    return Comparison(f"{part.name}: {ours.name} / {theirs.name}", ours.rates, theirs.rates, at_least, text)


def narrower(part: Part) -> Iterator[Comparison]:
    """AVX2 beside AVX-512, where the latter waits for memory."""
    roof = part.find(ROOF)
    for row in part.rows:
        wide = part.find(row.name, "avx512")
        if row.isa != "avx2" or wide is None or roof is None:
            continue
        if of_roof(wide, roof).point >= MEMORY_BOUND:
            subject = f"{part.name}: {row.name}, avx2 / avx512"
            yield Comparison(subject, row.rates, wide.rates, AVX2_OF_AVX512, f"at least {AVX2_OF_AVX512}")


def judged(part: Part) -> list[Comparison]:
    """Every goal of speed that this part's rows decide."""
    goals = MANY_GOALS if part.name.startswith("many") else STEP_GOALS
    judgements = [judge(goal, part) for goal in goals]
    return [judgement for judgement in judgements if judgement is not None] + list(narrower(part))


def start_verdict(part: Part) -> Verdict:
    row = part.find(start.OURS)
    assert row is not None
    middle = statistics.median(row.ms)
    goal = f"below {MOST_START_MS:.0f} ms"
    return Verdict("import and first step", f"{middle:.0f} ms", goal, middle < MOST_START_MS)
