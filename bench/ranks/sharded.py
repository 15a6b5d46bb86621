"""Stage 3 beside FSDP2, in bf16 and in fp32. Of FSDP2's configurations the fastest in these rounds counts."""

from __future__ import annotations

from . import sides, tables
from .measured import RanksRun

PRECISIONS = ("bf16", "fp32")


def case(run: RanksRun, precision: str) -> None:
    model, size = run.scale.model, run.world_size
    ours = sides.ours(model, size, 3, precision)
    results = run.measured([ours, *sides.fsdp(model, size, precision)])
    tables.show(run.report, f"stage 3 beside FSDP2, {precision}, {size} ranks", results)
    peers = {name: side for name, side in results.items() if name != ours.name}
    fastest = tables.fastest(peers)
    if ours.name not in results or fastest is None:
        run.without(
            f"stage 3 beside FSDP2, {precision}", *([ours.name] if fastest is not None else ["FSDP2"])
        )
        return
    run.report.verdicts.append(tables.not_slower(results[ours.name], fastest))
