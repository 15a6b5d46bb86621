"""Parameters and state on NVMe within a host budget, beside the fastest that DeepSpeed's NVMe offload was found to be.

A state that fits the host budget is kept there, and only the rest streams. DeepSpeed has no such budget: what it keeps
is in the memory table.
"""

from __future__ import annotations

from frame.report import Table, Verdict
from frame.side import SideError, Spec

from . import sides, tables
from .fio_beside import peer_disk
from .measured import StepRun

MOST_RESIDENT = 1.8e9  # with the small host budget
MOST_OF_DEEPSPEED = {"small": 0.85, "large": 0.4}
TRIAL_STEPS = 2

PAGE_CACHE = (
    "DeepSpeed's bytes are the kernel's count. Nothing drops the page cache: what DeepSpeed reads or writes through it"
    " is its gain."
)

SMALL, LARGE = "nvme1", "nvme3"


def fastest_deepspeed(run: StepRun) -> Spec | None:
    """Each configuration alone, one warm-up step and a short round; None if none of them trains."""
    assert run.peers is not None
    table = Table(
        "DeepSpeed's NVMe configurations", ("configuration", "s per step", "peak RSS, GB", "aio, zero")
    )
    times: dict[str, float] = {}
    specs = {spec.name: spec for spec in sides.deepspeed_on_nvme(run.scale.model, run.peers)}
    for spec in specs.values():
        run.say(f"trying {spec.name}")
        with run.started([spec]) as started:
            for side in started.values():
                try:
                    side.train(1)
                    round_ = side.train(TRIAL_STEPS)
                except SideError as error:
                    run.fail(spec.name, error)
                    continue
                times[spec.name] = round_.per_step
                peak = max(side.facts["peak"], *(round_.peak for round_ in side.rounds)) / tables.GB
                table.rows.append(
                    (spec.name, f"{round_.per_step:.2f}", f"{peak:.2f}", str(spec.settings["zero"]))
                )
    table.notes.append(
        f"One after the other, a step to warm up and then {TRIAL_STEPS}; the fastest is what the goals are judged by."
    )
    run.report.tables.append(table)
    return specs[min(times, key=lambda name: times[name])] if times else None


def case(run: StepRun, hosts: tuple[str, ...] = (SMALL, LARGE)) -> None:
    scale, report = run.scale, run.report
    budgets = {SMALL: scale.small_host, LARGE: scale.large_host}
    names = {host: f"ours, NVMe, host budget {budgets[host]}" for host in hosts}
    specs = [
        sides.on_nvme(scale.model, names[host], {"host_budget": budgets[host], "device_budget": scale.device})
        for host in hosts
    ]
    steps = dict.fromkeys(names.values(), scale.steps)
    peer = fastest_deepspeed(run) if run.peers is not None else None
    if peer is not None:
        steps[peer.name] = scale.peer_steps
        specs.append(peer)
    with peer_disk(run) as beside:
        results = run.measured(specs, scale.rounds, steps, beside)
    tables.show(
        report,
        "parameters and state on NVMe",
        results,
        [PAGE_CACHE],
    )
    for host, name in names.items():
        if name not in results:
            run.without(f"the host budget {budgets[host]}", name)
            continue
        ours = results[name]
        report.verdicts.append(tables.planned(ours))
        if host == SMALL:
            report.verdicts.append(
                Verdict(
                    f"peak RSS: {name}",
                    f"{ours.peak / tables.GB:.2f} GB",
                    f"at most {MOST_RESIDENT / tables.GB} GB",
                    ours.peak <= MOST_RESIDENT,
                )
            )
        if peer is not None and peer.name in results:
            goal = MOST_OF_DEEPSPEED["small" if host == SMALL else "large"]
            report.verdicts.append(tables.faster(ours, results[peer.name], goal))
        else:
            run.without(f"{name} beside DeepSpeed's NVMe offload", "DeepSpeed")
