"""From cells to tables and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from frame.report import Report, Table, Verdict, middle

from tiering.tierbench.comparison.fio import RunReading
from tiering.tierbench.ratios import Comparison, compare

from .cells import Cell
from .ours import OurReading

MOST_NS_RATIO = 1.2
MOST_PYTHON_NS = 5000.0
MOST_VERIFYING_DRIVER = 0.03


def as_fast(speed: Comparison) -> bool:
    """The goal for bandwidth: parity cannot be ruled out, and nothing is lost that one would notice."""
    return speed.median.high >= 1.0 and speed.median.point >= 0.98


def speeds(readings: Sequence[RunReading]) -> list[float]:
    return [reading.rate / 1e9 for reading in readings]


def costs(readings: Sequence[RunReading]) -> list[float]:
    return [reading.cpu_per_gb for reading in readings]


def driver_costs(readings: Sequence[RunReading]) -> list[float]:
    return [reading.driver_per_gb for reading in readings if isinstance(reading, OurReading)]


def times(readings: Sequence[RunReading], bs: int) -> list[float]:
    """Wall nanoseconds per block."""
    return [reading.seconds * 1e9 / (reading.nbytes / bs) for reading in readings]


def pairs_of(comparison: Comparison) -> str:
    return f"{comparison.smallest:.3f}-{comparison.largest:.3f}"


def bandwidth(cells: Sequence[Cell], report: Report) -> None:
    """GB/s beside fio's, and the goal for an engine that fio has: the interval reaches 1.0, the median 0.98."""
    columns = ("cell", "fio GB/s", "ours GB/s", "ours / fio, median", "geometric mean", "pairs")
    table = Table(_disk_title("Bandwidth", cells), columns)
    for cell in cells:
        fio, ours = speeds(cell.sides["fio"]), speeds(cell.sides["ours"])
        ratio = compare(ours, fio)
        name = f"{cell.engine} {cell.job.rw}"
        table.rows.append(
            (name, middle(fio), middle(ours), str(ratio.median), str(ratio.mean), pairs_of(ratio))
        )
        if cell.engine == "threads":
            continue
        goal = "at least 0.98, interval up to 1.0 or more"
        report.verdicts.append(Verdict(f"{name}: GB/s, ours / fio", str(ratio.median), goal, as_fast(ratio)))
    if any(cell.engine == "threads" for cell in cells):
        table.notes.append(
            "threads: fio has no such engine; the nearest is psync with as many jobs, and no goal is set against it."
        )
    table.notes.append(
        "Medians with the range of all runs; ratios per pair, with bootstrap 95 % intervals (seeded, 10,000 resamples)."
    )
    report.tables.append(table)


def cpu(cells: Sequence[Cell], report: Report) -> None:
    """CPU seconds per GB beside fio's, and the goal for an engine that fio has: at most fio's."""
    columns = ("cell", "fio", "ours", "ours / fio, median", "fio: whole process less an idle one")
    table = Table(_disk_title("CPU seconds per GB", cells), columns)
    for cell in cells:
        fio, ours = costs(cell.sides["fio"]), costs(cell.sides["ours"])
        ratio = compare(ours, fio)
        name = f"{cell.engine} {cell.job.rw}"
        whole = statistics.median(
            ((reading.whole_cpu_seconds or 0.0) - cell.fio_idle_cpu) / (reading.nbytes / 1e9)
            for reading in cell.sides["fio"]
        )
        table.rows.append((name, middle(fio, ".4f"), middle(ours, ".4f"), str(ratio.median), f"{whole:.4f}"))
        if cell.engine == "threads":
            continue
        report.verdicts.append(
            Verdict(
                f"{name}: CPU s/GB, ours / fio", str(ratio.median), "at most 1.0", ratio.median.point <= 1.0
            )
        )
    table.notes.append(
        "fio: its own account of its jobs, without start and end. The last column checks it: what the kernel charged"
        " the whole process tree, less a fio that does one block per second. Kernel threads (kworkers, interrupts)"
        " are charged to neither side."
    )
    report.tables.append(table)


def overhead(cells: Sequence[Cell], report: Report) -> None:
    """Nanoseconds per 64 KiB operation, and what Python adds to one."""
    columns = ("cell", "fio", "fio, no latencies", "ours", "ours / fio", "a ticket each")
    table = Table("Nanoseconds per 64 KiB operation on memory", (*columns, "Python adds", "of CPU"))
    for cell in cells:
        fio, lean, split, tickets = (
            times(cell.sides[side], cell.job.bs) for side in ("fio", "lean", "split", "tickets")
        )
        ratio = compare(split, fio)
        added = [ticket - other for ticket, other in zip(tickets, split, strict=True)]
        cpu_added = [
            (ticket.cpu_per_gb - other.cpu_per_gb) * cell.job.bs
            for ticket, other in zip(cell.sides["tickets"], cell.sides["split"], strict=True)
        ]
        name = f"{cell.engine}, {cell.place}, depth {cell.job.iodepth}, {cell.job.rw}"
        figures = (middle(side, ".0f") for side in (fio, lean, split))
        rest = (middle(side, ".0f") for side in (tickets, added, cpu_added))
        table.rows.append((name, *figures, str(ratio.median), *rest))
        adds = statistics.median(added)
        report.verdicts += [
            Verdict(
                f"{name}: ns per operation, ours / fio's io_uring",
                str(ratio.median),
                f"at most {MOST_NS_RATIO}",
                ratio.median.point <= MOST_NS_RATIO,
            ),
            Verdict(
                f"{name}: Python adds",
                f"{adds / 1000:.2f} us",
                f"below {MOST_PYTHON_NS / 1000:.0f} us",
                adds < MOST_PYTHON_NS,
            ),
        ]
    table.notes.append(
        "fio is its io_uring in every row. Ours: requests of many blocks, split in C. A ticket each: one per operation,"
        " submitted and waited for in Python; what that adds is the median of the rounds' differences, in time and in"
        " CPU time (of which some passes beside the I/O)."
    )
    report.tables.append(table)


def verify(cells: Sequence[Cell], report: Report) -> None:
    """What checksums cost, and the goal for the one driver thread: its time per byte limits all drives together."""
    columns = (
        "cell",
        "off GB/s",
        "on GB/s",
        "on / off",
        "CPU s/GB off",
        "CPU s/GB on",
        "driver off",
        "driver on",
    )
    table = Table("verify: a CRC32C of every 4 KiB page, 1 MiB blocks", columns)
    for cell in cells:
        plain, checked = cell.sides["plain"], cell.sides["verify"]
        name = f"{cell.engine}, {cell.place}, {cell.job.rw}"
        drivers = {side: driver_costs(readings) for side, readings in cell.sides.items()}
        table.rows.append(
            (
                name,
                middle(speeds(plain)),
                middle(speeds(checked)),
                str(compare(speeds(checked), speeds(plain)).median),
                middle(costs(plain), ".4f"),
                middle(costs(checked), ".4f"),
                middle(drivers["plain"], ".4f"),
                middle(drivers["verify"], ".4f"),
            )
        )
        driver = statistics.median(drivers["verify"])
        goal = f"at most {MOST_VERIFYING_DRIVER}"
        report.verdicts.append(
            Verdict(
                f"{name}: driver CPU s/GB, verify", f"{driver:.4f}", goal, driver <= MOST_VERIFYING_DRIVER
            )
        )
    report.tables.append(table)


def fill(report: Report, cells: Sequence[Cell]) -> None:
    """Add the tables of what was measured, and which flags each engine really had."""
    for cell in cells:
        report.facts[f"our {cell.engine} ({cell.experiment})"] = ", ".join(cell.flags) or "no flags"
    makers = {"disk": (bandwidth, cpu), "overhead": (overhead,), "verify": (verify,)}
    for experiment, tables in makers.items():
        subset = [cell for cell in cells if cell.experiment == experiment]
        for make in tables if subset else ():
            make(subset, report)


def _disk_title(label: str, cells: Sequence[Cell]) -> str:
    job = cells[0].job
    return f"{label}: {job.bs >> 10} KiB blocks, depth {job.iodepth}, {len(cells[0].sides['fio'])} pairs"
