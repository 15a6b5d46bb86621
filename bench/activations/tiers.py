"""Activations on each tier, beside plain PyTorch and save_on_cpu: time, peak memory and bytes, alternating."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from aio.beside import file_for_fio
from frame.measured import Measured, TrainingRun
from frame.report import Table, Verdict, middle
from frame.side import Side
from frame.training import stalls

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading
from tiering.tierbench.ratios import compare

from . import saved, sides
from .scale import MIB, Scale

CONSTANT = (96 + 32) * MIB
"""docs/guide/memory.md: where the largest activation has 1 MiB, and for tensors that have left."""
TEMPORARIES = 4
"""Tensors of the size of the largest activation that operations hold: two activations, and their gradients."""
MOST_OF_COMPUTE_AND_FIO = 1.1
MB = 1e6


def case(run: TrainingRun[Scale]) -> None:
    scale = run.scale
    everything = sum(saved.storages(scale.model))
    specs = [
        sides.ours(
            name,
            scale.model,
            {"device_budget": scale.device, **sides.moved_to(place, budget, scale.host)},
        )
        for name, place, budget in (
            (sides.ON_DEVICE, "device", 0),
            (sides.IN_HOST, "host", everything),
            (sides.ON_NVME, "nvme", scale.budget),
        )
    ]
    specs += [
        sides.plain(sides.PLAIN, scale.model, save_on_cpu=False),
        sides.plain(sides.SAVE_ON_CPU, scale.model, save_on_cpu=True),
    ]
    with file_for_fio(run, scale.fio_file) as job:
        measured = run.measured(specs, scale.rounds, 1, partial(_fio, job, scale.fio_seconds))
    run.report.tables.append(table(scale, measured))
    judge(run, measured)


def _fio(
    job: FioJob | None, seconds: float, started: Mapping[str, Side]
) -> dict[str, Callable[[], RunReading]]:
    """fio beside the side that swaps: it reads as many bytes as it writes."""
    if job is None or sides.ON_NVME not in started:
        return {}
    facts, mixed = started[sides.ON_NVME].facts, replace(job, rw="rw")
    return {sides.ON_NVME: partial(fio.run, mixed, facts["io_engine"], tuple(facts["io_flags"]), seconds)}


def table(scale: Scale, measured: Mapping[str, Measured]) -> Table:
    columns = ("side", "s per step", "forward", "backward", "stalled", "peak RSS, MB", "net of baseline")
    table = Table(
        f"activations of {sum(saved.storages(scale.model)) / MB:,.0f} MB",
        (*columns, "budgets, MB", "read per step, MB", "written", "last loss"),
    )
    for name, side in measured.items():
        facts, rounds = side.facts, side.rounds
        counted = [[round_.counted.get(way, 0) / MB for round_ in rounds] for way in ("read", "written")]
        table.rows.append(
            (
                name,
                middle(side.times),
                *(
                    f"{statistics.median(getattr(round_, part) for round_ in rounds):.3f}"
                    for part in ("forward", "backward")
                ),
                f"{statistics.median(round_.stall_share for round_ in rounds):.1%}",
                f"{side.peak / MB:,.0f}",
                f"{(side.peak - facts['baseline']) / MB:,.0f}",
                f"{facts['owned'] / MB:,.0f}" if "owned" in facts else "-",
                *(f"{statistics.median(each):,.1f}" for each in counted),
                f"{rounds[-1].loss:.6f}",
            )
        )
        if causes := stalls(rounds):
            table.notes.append(f"{name} stalled for {causes}.")
    table.notes.append(
        f"{sides.ON_NVME} has an activation budget of {scale.budget / MB:,.1f} MB, {sides.IN_HOST} one for all of them."
        " save_on_cpu pins memory: without that it copies nothing on a CPU. Medians of rounds of one step."
    )
    return table


def judge(run: TrainingRun[Scale], measured: Mapping[str, Measured]) -> None:
    scale, swapping = run.scale, measured.get(sides.ON_NVME)
    if swapping is None:
        run.without("activations on NVMe", sides.ON_NVME)
        return
    run.report.verdicts += [bytes_by_shapes(scale, swapping), within_budgets(scale, swapping)]
    resident = measured.get(sides.ON_DEVICE)
    if resident is None or not swapping.fio:
        run.without("a step beside compute and fio", sides.ON_DEVICE if swapping.fio else "fio")
        return
    run.report.verdicts.append(as_fast_as_the_machine(swapping, resident))


def bytes_by_shapes(scale: Scale, swapping: Measured) -> Verdict:
    """Every round, to the byte, in both directions; the state's by the plan."""
    moved = saved.swapped(saved.storages(scale.model), scale.budget)
    counted = {
        way: [int(round_.counted[way] - swapping.facts[f"planned_{way}"]) for round_ in swapping.rounds]
        for way in ("written", "read")
    }
    found = ", ".join(f"{way} {min(each):,} to {max(each):,}" for way, each in counted.items())
    holds = all(set(each) == {moved} for each in counted.values())
    return Verdict("bytes of activations per step", found, f"{moved:,} each, by the model's shapes", holds)


def within_budgets(scale: Scale, swapping: Measured) -> Verdict:
    """The peak of building and of all steps, beside the interpreter with torch."""
    facts, storages = swapping.facts, saved.storages(scale.model)
    constant = CONSTANT + TEMPORARIES * max(storages)
    net = swapping.peak - facts["baseline"]
    goal = f"at most {(facts['owned'] + constant) / MB:,.0f} MB: budgets {facts['owned'] / MB:,.0f},"
    goal += f" activation budget {scale.budget / MB:,.0f} of them, and {constant / MB:,.0f}"
    found = f"{net / MB:,.0f} MB with {sum(storages) / MB:,.0f} MB of activations"
    return Verdict("peak RSS net of baseline", found, goal, net <= facts["owned"] + constant)


def as_fast_as_the_machine(swapping: Measured, resident: Measured) -> Verdict:
    """A step beside the longer of the same step with activations on the device, and fio's time for its bytes."""
    disk = [
        round_.moved / reading.rate for round_, reading in zip(swapping.rounds, swapping.fio, strict=True)
    ]
    bounds = [max(each) for each in zip(resident.times, disk, strict=True)]
    ratio = compare(swapping.times, bounds).median
    found = (
        f"{ratio} (compute {statistics.median(resident.times):.2f} s, disk {statistics.median(disk):.2f} s)"
    )
    return Verdict(
        "step / max(compute, bytes at fio's rate)",
        found,
        f"at most {MOST_OF_COMPUTE_AND_FIO}",
        ratio.point <= MOST_OF_COMPUTE_AND_FIO,
    )
