"""Bytes over NVMe with blocks that run over chunks of rows, beside micro-batches: state and parameters on NVMe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from frame.measured import TrainingRun
from frame.report import Report, Table, Verdict
from frame.side import Side

from . import sides
from .scale import MIB, Scale

CHUNKS = (1, 2, 4, 8)
STEPS = 2
BUDGETS = {"device_budget": 2 * MIB, "host_budget": 16 * MIB, "cache_in_host": False}


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes over NVMe (read, written) of one optimizer step in ``parts``, which are "chunks" or "micro-batches"."""

    what: str
    parts: int
    planned: tuple[int, int]
    moved: tuple[float, float]


def case(run: TrainingRun[Scale]) -> None:
    model = run.scale.small
    moved = []
    with run.started([sides.ours("chunks of rows", model, BUDGETS)]) as started:
        for side in started.values():
            for chunks in CHUNKS:
                rows = {} if chunks == 1 else {"block_rows": model.batch // chunks}
                moved.append(_train(side, "chunks", chunks, {"tiering": BUDGETS | rows}, 1))
    for parts in CHUNKS[1:]:
        smaller = replace(model, batch=model.batch // parts)
        settings = {"accumulation": parts, "tiering": BUDGETS}
        with run.started([sides.ours(f"{parts} micro-batches", smaller, BUDGETS)]) as started:
            moved += [_train(side, "micro-batches", parts, settings, parts) for side in started.values()]
    run.sides += moved
    show(run.report, run.scale, moved)


def _train(side: Side, what: str, parts: int, settings: dict[str, Any], passes: int) -> Moved:
    side.rebuild(settings | {"zero": {"stage3_param_persistence_threshold": 0}, "exact": True})
    # The first step finds in memory what filling the tiers left there.
    side.train(passes)
    round_ = side.train(STEPS * passes)
    planned = side.facts["planned_read"], side.facts["planned_written"]
    moved = round_.counted["read"] / STEPS, round_.counted["written"] / STEPS
    return Moved(what, parts, planned, moved)


def show(report: Report, scale: Scale, moved: list[Moved]) -> None:
    columns = ("a batch in", "read per step", "written", "planned: read", "written")
    table = Table(f"bytes over NVMe of parameters and state, {scale.small}", columns)
    for each in moved:
        figures = (f"{nbytes:,.0f}" for nbytes in (*each.moved, *each.planned))
        table.rows.append((f"{each.parts} {each.what}", *figures))
    report.tables.append(table)
    chunked = [each for each in moved if each.what == "chunks"]
    found = {each.moved for each in chunked[1:]}
    read, written = chunked[-1].planned
    report.verdicts.append(
        Verdict(
            f"bytes per step in {', '.join(str(each.parts) for each in chunked[1:])} chunks",
            " or ".join(f"{a:,.0f} read, {b:,.0f} written" for a, b in sorted(found)),
            f"the planned {read:,} and {written:,}, whatever their number",
            found == {(read, written)},
        )
    )
