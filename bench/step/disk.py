"""The disk-bound case: nothing cached, and the step beside what fio needs for the planned bytes."""

from __future__ import annotations

from frame.report import Verdict

from tiering.tierbench.ratios import compare

from . import sides, tables
from .fio_beside import peer_disk
from .measured import StepRun

MOST_OF_FIO = 1.1


def case(run: StepRun) -> None:
    scale = run.scale
    name = "ours, NVMe, nothing cached"
    tiering = {"cache_in_host": False, "host_budget": scale.small_host, "device_budget": scale.device}
    with peer_disk(run) as beside:
        found = run.measured([sides.on_nvme(scale.model, name, tiering)], scale.rounds, scale.steps, beside)
    tables.show(run.report, "disk-bound", found)
    if name not in found:
        run.without("the disk-bound case", name)
        return
    ours = found[name]
    run.report.verdicts.append(tables.planned(ours))
    if not ours.fio:
        run.without("the disk-bound step beside fio", "fio")
        return
    by_fio = [ours.planned / (one.nbytes / one.seconds) for one in ours.fio]
    ratio = compare(ours.times, by_fio).median
    what = f"time per step: {name} / planned bytes at fio's rate"
    run.report.verdicts.append(
        Verdict(what, str(ratio), f"at most {MOST_OF_FIO}", ratio.point <= MOST_OF_FIO)
    )
