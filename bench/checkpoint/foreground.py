"""Saved and loaded by everyone in turn, beside dd on the same disk; ours from NVMe, and from memory as the peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from . import sides, tables
from .dd import Disk
from .side import CheckpointRun, SavingSpec
from .tables import COPY, READ, WRITE, Measured

BYTES_PER_PARAMETER = 12
FLUSHED = "dd, write with conv=fsync, once"


def alternated(run: CheckpointRun, specs: Sequence[SavingSpec]) -> tuple[dict[str, Measured], tables.Disk]:
    """``specs`` and dd in turn: those that got through all rounds. Raises DdError."""
    with (
        TemporaryDirectory(dir=run.place.directory, prefix="dd.") as directory,
        run.started(specs) as started,
    ):
        if not started:
            return {}, {}
        parameters = next(iter(started.values())).facts["parameters"]
        disk = Disk(Path(directory), BYTES_PER_PARAMETER * parameters)
        dd = {WRITE: disk.write, READ: disk.read, COPY: disk.copy}
        trips = {name: side.trip for name, side in started.items()}
        rounds = run.alternate(run.scale.rounds, {**trips, **dd})
        if FLUSHED not in run.report.facts:
            run.report.facts[FLUSHED] = f"{disk.write(fsync=True).rate / tables.GB:.2f} GB/s"
        results = {
            name: Measured(name, started[name].facts, rounds[name]) for name in trips if name in rounds
        }
    run.sides += results.values()
    return results, {name: rounds[name] for name in dd if name in rounds}


def case(run: CheckpointRun) -> None:
    scale, report = run.scale, run.report
    specs = [
        sides.on_nvme(scale),
        sides.in_memory(scale),
        sides.torch_save(scale),
        sides.torch_dcp(scale),
    ]
    results, disk = alternated(run, specs)
    show(run, "save and load", results, disk)
    report.facts |= {f"about {name}": side.facts["about"] for name, side in results.items()}
    for ours in (sides.NVME, sides.RAM):
        for peer in (sides.TORCH, sides.DCP):
            if ours in results and peer in results:
                report.verdicts += tables.beside(results[ours], results[peer])
            else:
                run.without(f"{ours} beside {peer}", *{ours, peer} - set(results))


def ranks(run: CheckpointRun) -> None:
    """The same state in two halves: each rank saves its own, with half of the threads."""
    threads = max(1, run.place.threads // sides.RANKS)
    narrow = replace(run, place=replace(run.place, threads=threads))
    results, disk = alternated(narrow, [sides.on_nvme(run.scale, sides.RANKS)])
    show(run, f"save and load, {sides.RANKS} ranks of {threads} threads", results, disk)


def show(run: CheckpointRun, title: str, results: dict[str, Measured], disk: tables.Disk) -> None:
    """Tables, and the goals of ours beside dd and its own ceiling."""
    if not results or len(disk) < 3:
        run.without(title, "a side" if not results else "dd")
        return
    run.report.tables += [
        tables.times(f"{title}: time", results, disk),
        tables.memory(f"{title}: memory", results),
    ]
    for name, side in results.items():
        if side.has_ceiling:
            write, read = (WRITE, READ) if name == sides.RAM else (COPY, COPY)
            run.report.verdicts += [
                tables.at_rate(f"saving, {name}", side.saved, write, disk[write]),
                tables.at_rate(f"loading, {name}", side.best_loaded, read, disk[read]),
                tables.below_ceiling(side),
            ]
