"""From rows to tables and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from frame.report import Report, Table, middle

from tiering.tierbench.ratios import compare

from .goals import Comparison, judged, of_roof, start_verdict
from .readings import ROOF, Part

TWO_SPEEDS = 1.25
"""Memory ran at two speeds if the roof's fastest round is this much faster than its slowest."""


def speeds(part: Part) -> Table:
    """Milliseconds, GB/s and the fraction of the roof of every row, AVX-512 above AVX2."""
    columns = ("row", "B per parameter", "ms", "GB/s", "of the roof, by round")
    table = Table(part.title, columns)
    roof = part.find(ROOF)
    for row in part.rows:
        fraction = str(of_roof(row, roof)) if roof is not None and row is not roof else ""
        form = ".1f" if statistics.median(row.ms) >= 10 else ".3f"
        table.rows.append(
            (row.label, str(row.nbytes), middle(row.ms, form), middle(row.gb_per_s, ".1f"), fraction)
        )
    table.notes += part.notes
    return table


def ratios(part: Part) -> Table:
    """How many times as fast as each peer's row every one of ours is, and AVX2 beside AVX-512."""
    peers = [row for row in part.rows if not row.isa and row.name != ROOF]
    wide = any(row.isa == "avx512" for row in part.rows) and any(row.isa == "avx2" for row in part.rows)
    columns = ("ours", *(f"/ {peer.name}" for peer in peers), *(["/ avx512"] if wide else []))
    table = Table(f"{part.name}: ratios of speed, ours / theirs", columns)
    for row in part.rows:
        if not row.isa:
            continue
        figures = [str(compare(row.rates, peer.rates).median) for peer in peers]
        if wide:
            other = part.find(row.name, "avx512") if row.isa != "avx512" else None
            figures.append(str(compare(row.rates, other.rates).median) if other else "")
        table.rows.append((row.label, *figures))
    return table


def two_speeds(part: Part) -> tuple[list[int], list[int]] | None:
    """Numbers of the rounds in which memory was slow and in which it was fast; None if it ran at one speed.

    They part at the middle of the range of the roof, on a logarithmic scale.
    """
    roof = part.find(ROOF)
    if roof is None or max(roof.ms) < TWO_SPEEDS * min(roof.ms):
        return None
    border = (max(roof.ms) * min(roof.ms)) ** 0.5
    slow = [number for number, ms in enumerate(roof.ms) if ms > border]
    return slow, [number for number in range(len(roof.ms)) if number not in slow]


def by_speed(part: Part, goals: Sequence[Comparison]) -> Table | None:
    """What the goals' ratios are in slow and in fast rounds, if there were both."""
    speeds = two_speeds(part)
    roof = part.find(ROOF)
    if speeds is None or roof is None or not goals:
        return None
    slow, fast = speeds
    table = Table(
        f"{part.name}: the same by the speed of memory",
        ("what", *(f"{len(rounds)} {name} rounds" for name, rounds in (("slow", slow), ("fast", fast)))),
    )
    rates = roof.gb_per_s
    limits = (middle([rates[i] for i in rounds], ".1f") for rounds in speeds)
    table.rows.append(("roof, GB/s", *limits))
    table.rows += [(goal.what, str(goal.ratio(slow)), str(goal.ratio(fast))) for goal in goals]
    return table


def starts(part: Part) -> Table:
    table = Table(part.title, ("side", "ms"), notes=part.notes)
    table.rows = [(row.name, middle(row.ms, ".0f")) for row in part.rows]
    return table


def fill(report: Report, parts: Sequence[Part]) -> None:
    """Add every part's tables, and its verdicts."""
    for part in parts:
        if part.name == "start":
            report.tables.append(starts(part))
            report.verdicts.append(start_verdict(part))
            continue
        goals = judged(part)
        report.tables += [speeds(part), ratios(part)]
        if (table := by_speed(part, goals)) is not None:
            report.tables.append(table)
        report.verdicts += [goal.verdict() for goal in goals]
    if parts:
        report.tables[0].notes.append(
            "Medians with the range of all rounds. Fractions and ratios are medians of those of each round, with"
            " bootstrap 95 % intervals (seeded, 10,000 resamples)."
        )
