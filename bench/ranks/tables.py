"""What the cases share: the tables of sides, and verdicts from ratios of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from frame.report import Report, Table, Verdict, middle

from tiering.tierbench.ratios import compare

from .measured import Measured

MB = 1e6
NOT_SLOWER = 1.0


def times(title: str, sides: Mapping[str, Measured]) -> Table:
    """Seconds per step and where they went, on the rank that took longest."""
    table = Table(
        title, ("side", "s per step", "forward", "backward", "step", "idle again", "CPU s", "last loss")
    )
    for side in sides.values():
        longest = [max(turn.ranks, key=lambda rank: rank.seconds) for turn in side.turns]
        parts = [
            statistics.median(getattr(round_, part) / round_.steps for round_ in longest)
            for part in ("forward", "backward", "update", "settled")
        ]
        cpu = [max(turn.counted(rank, "cpu") for rank in range(side.world_size)) for turn in side.turns]
        loss = side.turns[-1].loss
        table.rows.append(
            (
                side.name,
                middle(side.times),
                *(f"{part:.3f}" for part in parts),
                middle(cpu, ".2f"),
                f"{loss:.4f}",
            )
        )
    rounds = ", ".join(sorted({f"{len(side.turns)} x {side.turns[0].steps}" for side in sides.values()}))
    table.notes.append(
        f"Medians with the range of all rounds. Rounds and steps in each: {rounds}. CPU: user and system, of all"
        " threads of the rank that needed most."
    )
    return table


def traffic(title: str, sides: Mapping[str, Measured]) -> Table:
    """Memory of a rank, and bytes between ranks."""
    columns = ("side", "peak RSS, MB: building", "training", "net of baseline", "sent per step, MB")
    table = Table(title, (*columns, "by the kernel, of all ranks", "per rank and parameter, bytes"))
    for side in sides.values():
        sent = statistics.median(turn.counted(0, "sent: ") for turn in side.turns)
        wires = [turn.wire / turn.steps for turn in side.turns if turn.wire is not None]
        wire = statistics.median(wires) if wires else 0.0
        table.rows.append(
            (
                side.name,
                f"{side.built / MB:.0f}",
                f"{side.peak / MB:.0f}",
                f"{(max(side.built, side.peak) - side.baseline) / MB:.0f}",
                f"{sent / MB:.2f}" if sent else "",
                f"{wire / MB:.2f}" if wires else "",
                f"{wire / side.world_size / side.parameters:.2f}" if wires else "",
            )
        )
    return table


def overlap(title: str, sides: Mapping[str, Measured]) -> Table:
    """How much of the collectives' time was no waiting; of those sides that tell."""
    table = Table(
        title,
        (
            "side",
            "s per step, traced",
            "network in use",
            "compute waited for it",
            "overlap share",
            "agreed, ms",
        ),
    )
    for side in sides.values():
        if not side.overlaps:
            continue
        agreed = [
            1e3 * turn.counted(rank, "stalled: agreement")
            for turn in side.turns
            for rank in range(side.world_size)
        ]
        table.rows.append(
            (
                side.name,
                middle([reading.step for reading in side.overlaps]),
                middle([reading.used for reading in side.overlaps]),
                middle([reading.waited for reading in side.overlaps]),
                middle([reading.share for reading in side.overlaps], ".1%"),
                middle(agreed, ".1f"),
            )
        )
    table.notes.append(
        "Of each rank's traced steps. In use: seconds in which at least one gather or exchange was under way there,"
        " from its issue until it was complete, or until who waited for it went on; other ranks' delays are in it."
        " Waited: seconds in which the thread that trains did nothing but wait for one. Overlap share: 1 - waited / in"
        " use. What is sent by a CPU is also work for the CPU: where it overlaps with compute, it is not free."
        " Agreed: milliseconds of a step in which a rank waited for the small tables that all exchange, which is a wait"
        " for the slowest rank."
    )
    return table


def show(report: Report, title: str, sides: Mapping[str, Measured]) -> None:
    if not sides:
        return
    report.tables += [times(f"{title}: time", sides), traffic(f"{title}: memory and bytes", sides)]
    if any(side.overlaps for side in sides.values()):
        report.tables.append(overlap(f"{title}: overlap", sides))


def not_slower(ours: Measured, theirs: Measured) -> Verdict:
    """Seconds per step, round by round."""
    ratio = compare(ours.times, theirs.times)
    subject = f"time per step: {ours.name} / {theirs.name}"
    result = f"{ratio.median}, rounds {ratio.smallest:.3f}-{ratio.largest:.3f}"
    return Verdict(subject, result, f"at most {NOT_SLOWER}", ratio.median.point <= NOT_SLOWER)


def fastest(sides: Mapping[str, Measured]) -> Measured | None:
    return min(sides.values(), key=lambda side: statistics.median(side.times), default=None)
