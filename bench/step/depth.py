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

from frame.measured import Measured
from frame.report import Table, Verdict, middle

from tiering.tierbench.ratios import compare

from . import sides
from .measured import StepRun

WITHIN = 0.1


def case(run: StepRun) -> None:
    shallow, deep = run.scale.depths
    report = run.report
    table = Table(
        f"depth {shallow} and {deep}: nanoseconds per parameter and step",
        ("what", f"{shallow} blocks", f"{deep} blocks", f"{deep} / {shallow}"),
    )
    for label, pair in {**_times(run), **_overheads(run)}.items():
        if pair is None:
            run.without(f"depth: {label}", "both depths")
            continue
        ratio = compare(pair[1], pair[0]).median
        table.rows.append((label, *(middle(per, ".2f") for per in pair), str(ratio)))
        flat = abs(ratio.point - 1) <= WITHIN
        report.verdicts.append(
            Verdict(f"{label}, {deep} / {shallow} blocks", str(ratio), f"1 within {WITHIN:.0%}", flat)
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
    for label, specs in (("time in RAM", ram), ("time streamed", nvme)):
        results = run.measured(specs, max(1, scale.rounds - 3), scale.steps)
        pairs[label] = _both([_per_parameter(results[spec.name]) for spec in specs if spec.name in results])
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
    results = run.measured(specs, scale.rounds, scale.overhead_steps)
    if len(results) < len(specs):
        return {"host overhead": None}
    return {
        "host overhead": _both(
            [
                overhead(
                    results[f"ours, narrow, {layers} blocks"], results[f"plain, narrow, {layers} blocks"]
                )
                for layers in scale.depths
            ]
        )
    }


def overhead(ours: Measured, plain: Measured) -> list[float]:
    """Nanoseconds per parameter and step, by round."""
    return [
        1e9
        * ((round_.seconds - round_.settled - round_.counted["stalled"]) / round_.steps - other.per_step)
        / ours.facts["parameters"]
        for round_, other in zip(ours.rounds, plain.rounds, strict=True)
    ]


def _per_parameter(side: Measured) -> list[float]:
    return [1e9 * seconds / side.facts["parameters"] for seconds in side.times]


def _both(series: Sequence[list[float]]) -> Pair | None:
    return (series[0], series[1]) if len(series) == 2 else None
