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
        results = run.measured([sides.on_nvme(scale.model, name, tiering)], scale.rounds, scale.steps, beside)
    tables.show(run.report, "disk-bound", results)
    if name not in results:
        run.without("the disk-bound case", name)
        return
    ours = results[name]
    run.report.verdicts.append(tables.planned(ours))
    if not ours.fio:
        run.without("the disk-bound step beside fio", "fio")
        return
    by_fio = [ours.planned / (reading.nbytes / reading.seconds) for reading in ours.fio]
    ratio = compare(ours.times, by_fio).median
    subject = f"time per step: {name} / planned bytes at fio's rate"
    run.report.verdicts.append(
        Verdict(subject, str(ratio), f"at most {MOST_OF_FIO}", ratio.point <= MOST_OF_FIO)
    )
