"""A model eight times as deep: time and host overhead per parameter are to stay what they were.

Time, at a width where arithmetic and transfers matter, with everything in RAM and with everything streamed.

Host overhead: what the engine does beside arithmetic and waiting (hooks, tickets, bookkeeping, system calls). It is
seen where there is next to no arithmetic: blocks so narrow that a step of theirs is almost nothing but host work, all
of them streamed. From their step, the seconds that compute stalled and those of the plain loop at the same depth are
taken away; what is left is divided by the parameters, of which each block has as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from frame.report import Table, Verdict, middle

from tiering.tierbench.ratios import compare

from . import sides
from .measured import Measured, StepRun

WITHIN = 0.1


def case(run: StepRun) -> None:
    shallow, deep = run.scale.depths
    report = run.report
    table = Table(
        f"depth {shallow} and {deep}: nanoseconds per parameter and step",
        ("what", f"{shallow} blocks", f"{deep} blocks", f"{deep} / {shallow}"),
    )
    for what, found in {**_times(run), **_overheads(run)}.items():
        if found is None:
            run.without(f"depth: {what}", "both depths")
            continue
        ratio = compare(found[1], found[0]).median
        table.rows.append((what, *(middle(per, ".2f") for per in found), str(ratio)))
        flat = abs(ratio.point - 1) <= WITHIN
        report.verdicts.append(
            Verdict(f"{what}, {deep} / {shallow} blocks", str(ratio), f"1 within {WITHIN:.0%}", flat)
        )
    table.notes.append(
        f"Time at width {run.scale.depth_width}. Host overhead: at width {run.scale.overhead_width}, all streamed, the"
        " engine's step less its stalls, less the plain loop's step at that depth."
    )
    report.tables.append(table)


Pair = tuple[list[float], list[float]]


def _times(run: StepRun) -> dict[str, Pair | None]:
    scale = run.scale
    streamed = {"cache_in_host": False, "host_budget": scale.small_host, "device_budget": scale.device}
    models = [replace(scale.model, width=scale.depth_width, layers=layers) for layers in scale.depths]
    ram = [sides.in_memory(model, f"ours, in RAM, {model.layers} blocks") for model in models]
    nvme = [sides.on_nvme(model, f"ours, streamed, {model.layers} blocks", streamed) for model in models]
    pairs: dict[str, Pair | None] = {}
    for what, specs in (("time in RAM", ram), ("time streamed", nvme)):
        found = run.measured(specs, max(1, scale.rounds - 3), scale.steps)
        pairs[what] = _both([_per_parameter(found[spec.name]) for spec in specs if spec.name in found])
    return pairs


def _overheads(run: StepRun) -> dict[str, Pair | None]:
    scale = run.scale
    streamed = {"cache_in_host": False, "host_budget": scale.small_host, "device_budget": scale.device}
    specs = []
    for layers in scale.depths:
        model = replace(scale.model, width=scale.overhead_width, layers=layers)
        tiny = {"stage3_param_persistence_threshold": 0}  # else nothing of such a model would move
        specs += [
            sides.on_nvme(model, f"ours, narrow, {layers} blocks", streamed, **tiny),
            sides.plain(model, f"plain, narrow, {layers} blocks"),
        ]
    found = run.measured(specs, scale.rounds, scale.overhead_steps)
    if len(found) < len(specs):
        return {"host overhead": None}
    return {
        "host overhead": _both(
            [
                overhead(found[f"ours, narrow, {layers} blocks"], found[f"plain, narrow, {layers} blocks"])
                for layers in scale.depths
            ]
        )
    }


def overhead(ours: Measured, plain: Measured) -> list[float]:
    """Nanoseconds per parameter and step, by round."""
    return [
        1e9
        * ((one.seconds - one.settled - one.counted["stalled"]) / one.steps - other.per_step)
        / ours.facts["parameters"]
        for one, other in zip(ours.rounds, plain.rounds, strict=True)
    ]


def _per_parameter(side: Measured) -> list[float]:
    return [1e9 * seconds / side.facts["parameters"] for seconds in side.times]


def _both(found: Sequence[list[float]]) -> Pair | None:
    return (found[0], found[1]) if len(found) == 2 else None
