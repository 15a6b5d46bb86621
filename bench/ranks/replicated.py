"""Stages 0, 1 and 2 beside what torch has for them, in fp32: DDP, DDP with ZeroRedundancyOptimizer, and FSDP2 that
keeps parameters gathered from forward to backward."""

from __future__ import annotations

from . import sides, tables
from .measured import RanksRun


def case(run: RanksRun) -> None:
    model, size = run.scale.model, run.world_size
    pairs = [
        (sides.ours(model, size, 0, "fp32"), sides.ddp(model, size, sharded=False)),
        (sides.ours(model, size, 1, "fp32"), sides.ddp(model, size, sharded=True)),
        (sides.ours(model, size, 2, "fp32"), sides.stage_2_of_fsdp(model, size)),
    ]
    results = run.measured([spec for pair in pairs for spec in pair])
    tables.show(run.report, f"stages 0, 1 and 2, fp32, {size} ranks", results)
    for ours, theirs in pairs:
        if ours.name in results and theirs.name in results:
            run.report.verdicts.append(tables.not_slower(results[ours.name], results[theirs.name]))
        else:
            run.without(f"{ours.name} beside {theirs.name}", *{ours.name, theirs.name} - set(results))
