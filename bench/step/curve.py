"""Host budget against step time and resident memory: a table, and a picture of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from frame.measured import Measured
from frame.report import Table, middle

from tiering.config.training import parse_size

from . import sides, tables
from .measured import StepRun

AT_ONCE = 8 << 30
"""Budgets that run in turn: as many, smallest first, as come to this many bytes together."""


def batches(budgets: Sequence[str]) -> list[list[str]]:
    """Budgets cut so that the processes of a batch fit memory beside each other."""
    cut: list[list[str]] = [[]]
    for budget in sorted(budgets, key=parse_size):
        if cut[-1] and sum(map(parse_size, [*cut[-1], budget])) > AT_ONCE:
            cut.append([])
        cut[-1].append(budget)
    return cut


def case(run: StepRun) -> dict[str, Measured]:
    """The points of the curve by their host budget, for ``draw``."""
    scale = run.scale
    points: dict[str, Measured] = {}
    for batch in batches(scale.curve):
        specs = [
            sides.on_nvme(scale.model, budget, {"host_budget": budget, "device_budget": scale.device})
            for budget in batch
        ]
        points |= run.measured(specs, scale.curve_rounds, scale.steps)
    table = Table(
        f"curve: host budget, parameters and state on NVMe, device budget {scale.device}",
        ("host budget", "s per step", "stalled", "NVMe per step, GB", "peak RSS, GB", "net of baseline"),
    )
    for budget, point in points.items():
        stalled = statistics.median(round_.stall_share for round_ in point.rounds)
        moved = statistics.median(round_.moved for round_ in point.rounds) / tables.GB
        net = (point.peak - point.facts["baseline"]) / tables.GB
        resident = f"{point.peak / tables.GB:.2f}", f"{net:.2f}"
        table.rows.append((budget, middle(point.times), f"{stalled:.1%}", f"{moved:.3f}", *resident))
    together = "; ".join(", ".join(batch) for batch in batches(scale.curve))
    table.notes.append(f"In turn, where memory holds them beside each other: {together}.")
    run.report.tables.append(table)
    for budget in scale.curve:
        if budget not in points:
            run.without(f"the curve at {budget}", f"the side {budget}")
    return points


def draw(points: dict[str, Measured], title: str, path: Path) -> None:
    """Both curves over the host budget, as PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    budgets = [parse_size(budget) / 2**30 for budget in points]
    figure, seconds_axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    medians = [statistics.median(point.times) for point in points.values()]
    low = [median - min(point.times) for median, point in zip(medians, points.values(), strict=True)]
    high = [max(point.times) - median for median, point in zip(medians, points.values(), strict=True)]
    seconds_axis.errorbar(budgets, medians, yerr=(low, high), marker="o", capsize=3, color="tab:blue")
    seconds_axis.set_xlabel("host budget, GiB")
    seconds_axis.set_ylabel("seconds per step: median and range", color="tab:blue")
    seconds_axis.set_ylim(bottom=0)
    right = seconds_axis.twinx()
    right.plot(budgets, [point.peak / tables.GB for point in points.values()], "s--", color="tab:red")
    right.set_ylabel("peak RSS, GB", color="tab:red")
    right.set_ylim(bottom=0)
    seconds_axis.set_title(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
