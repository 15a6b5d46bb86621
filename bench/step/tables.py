"""What the cases share: the tables of sides, and verdicts from ratios of rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from frame.measured import Measured
from frame.report import Report, Table, Verdict, middle
from frame.training import stalls

from tiering.tierbench.ratios import compare

GB = 1e9


def times(title: str, sides: Mapping[str, Measured]) -> Table:
    """Seconds per step and where they went."""
    table = Table(
        title, ("side", "s per step", "forward", "backward", "step", "idle again", "stalled", "last loss")
    )
    for side in sides.values():
        rounds = side.rounds
        parts = [
            statistics.median(getattr(round_, part) / round_.steps for round_ in rounds)
            for part in ("forward", "backward", "update", "settled")
        ]
        counts = "stalled" in rounds[0].counted
        stalled = f"{statistics.median(round_.stall_share for round_ in rounds):.1%}" if counts else ""
        table.rows.append(
            (
                side.name,
                middle(side.times),
                *(f"{part:.3f}" for part in parts),
                stalled,
                f"{rounds[-1].loss:.3f}",
            )
        )
    for side in sides.values():
        if causes := stalls(side.rounds):
            table.notes.append(f"{side.name} stalled for {causes}.")
    steps = ", ".join(f"{side.name}: {len(side.rounds)} x {side.rounds[0].steps}" for side in sides.values())
    table.notes.append(f"Medians with the range of all rounds. Rounds and steps in each: {steps}.")
    return table


def memory(title: str, sides: Mapping[str, Measured]) -> Table:
    """Resident memory, and bytes over NVMe: planned, counted, and as the kernel says."""
    columns = ("side", "peak RSS, GB: building", "training", "net of baseline", "NVMe per step, GB")
    table = Table(
        title,
        (*columns, "planned", "by the kernel: read + written", "GB/s over the step", "fio GB/s", "of fio"),
    )
    for side in sides.values():
        building, training = (peak / GB for peak in side.peaks)
        moved = statistics.median(round_.moved for round_ in side.rounds)
        kernel = (
            statistics.median(round_.disk[way] / round_.steps for round_ in side.rounds) / GB
            for way in (0, 1)
        )
        rates = [round_.moved / round_.per_step / GB for round_ in side.rounds]
        fio = [reading.rate / 1e9 for reading in side.fio]
        table.rows.append(
            (
                side.name,
                f"{building:.2f}",
                f"{training:.2f}",
                f"{(side.peak - side.facts['baseline']) / GB:.2f}",
                f"{moved / GB:.3f}" if moved else "-",
                f"{side.planned / GB:.3f}" if side.planned else "",
                " + ".join(f"{way:.3f}" for way in kernel),
                middle(rates, ".2f") if moved else "-",
                middle(fio, ".2f") if fio else "",
                str(compare(rates, fio).median) if fio else "",
            )
        )
    return table


def show(report: Report, title: str, sides: Mapping[str, Measured], notes: Sequence[str] = ()) -> None:
    """Both tables of ``sides``, if there are any."""
    if not sides:
        return
    table = memory(f"{title}: memory and bytes", sides)
    table.notes += notes
    report.tables += [times(f"{title}: time", sides), table]
    for side in sides.values():
        if owned := side.facts.get("owned"):
            table.notes.append(
                f"{side.name} planned {owned / GB:.2f} GB of memory, device and host tier together."
            )
        if retried := sum(round_.counted.get("retries", 0) for round_ in side.rounds):
            table.notes.append(f"{side.name}: {retried:.0f} transfers were retried, beside the bytes above.")


def faster(ours: Measured, theirs: Measured, at_most: float) -> Verdict:
    """Seconds per step, round by round."""
    ratio = compare(ours.times, theirs.times).median
    subject = f"time per step: {ours.name} / {theirs.name}"
    return Verdict(subject, str(ratio), f"at most {at_most}", ratio.point <= at_most)


def smaller(ours: Measured, theirs: Measured, at_most: float) -> Verdict:
    """Peak resident memory of the whole process, building included."""
    ratio = ours.peak / theirs.peak
    result = f"{ratio:.3f} ({ours.peak / GB:.2f} of {theirs.peak / GB:.2f} GB)"
    return Verdict(f"peak RSS: {ours.name} / {theirs.name}", result, f"at most {at_most}", ratio <= at_most)


def planned(side: Measured) -> Verdict:
    """Bytes counted in C against the plan's, in every round."""
    counted = sorted({round_.moved for round_ in side.rounds})
    result = " to ".join(f"{moved:,.0f}" for moved in dict.fromkeys((counted[0], counted[-1])))
    goal = f"the planned {side.planned:,}, read and written alike"
    return Verdict(f"bytes per step: {side.name}", result, goal, side.as_planned)
