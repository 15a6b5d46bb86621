"""The formats of the optimizer state: bytes per step, and whether time follows them.

Bytes per parameter are judged with nothing kept in host memory, as the design's table counts them; time with the small
host budget, where each format also keeps a larger share of its state in memory.
"""

from __future__ import annotations

import statistics

from frame.measured import Measured
from frame.report import Table, Verdict

from tiering.tierbench.ratios import compare

from . import sides, tables
from .measured import StepRun

BYTES_PER_PARAMETER = {"fp32": 30, "split": 28, "bf16": 22, "split+bf16": 20}
"""Over NVMe per step, parameters and state there: the design's table."""

BYTES_WITHIN = 0.01
"""Small parameters, below the persistence threshold, never leave the device: a thousandth of the model."""

TIME_WITHIN = 0.1


def per_parameter(side: Measured) -> float:
    """Bytes counted in C per step and parameter."""
    return float(statistics.median(round_.moved for round_ in side.rounds) / side.facts["parameters"])


def streamed(run: StepRun, state: str) -> Measured | None:
    """One settled round with nothing cached: its bytes are exact, so it takes no more."""
    scale = run.scale
    tiering = {
        "state": state,
        "cache_in_host": False,
        "host_budget": scale.small_host,
        "device_budget": scale.device,
    }
    name = f"ours, {state}, nothing cached"
    return run.measured([sides.on_nvme(scale.model, name, tiering)], 1, 2).get(name)


def case(run: StepRun) -> None:
    scale, report = run.scale, run.report
    table = Table(
        "state formats, nothing cached: bytes over NVMe per step and parameter",
        ("state", "counted", "planned", "the design's table", "peak RSS, GB"),
    )
    for state, expected in BYTES_PER_PARAMETER.items():
        side = streamed(run, state)
        if side is None:
            run.without(f"bytes per parameter of {state}", f"ours, {state}, nothing cached")
            continue
        counted, plan = per_parameter(side), side.planned / side.facts["parameters"]
        table.rows.append(
            (state, f"{counted:.3f}", f"{plan:.3f}", str(expected), f"{side.peak / tables.GB:.2f}")
        )
        close = abs(counted / expected - 1) <= BYTES_WITHIN
        report.verdicts += [
            tables.planned(side),
            Verdict(
                f"bytes per parameter: {state}",
                f"{counted:.2f}",
                f"{expected}, within {BYTES_WITHIN:.0%}",
                close,
            ),
        ]
    report.tables.append(table)

    budgets = {"host_budget": scale.small_host, "device_budget": scale.device}
    names = {f"ours, {state}": state for state in BYTES_PER_PARAMETER}
    specs = [sides.on_nvme(scale.model, name, {"state": state, **budgets}) for name, state in names.items()]
    results = run.measured(specs, max(1, scale.rounds - 3), scale.steps)
    tables.show(report, f"state formats, host budget {scale.small_host}", results)
    report.verdicts += [tables.planned(side) for side in results.values()]
    base = results.get("ours, fp32")
    for name in list(names)[1:]:
        if base is None or name not in results:
            run.without(f"time of {name} beside that of fp32", *({"ours, fp32", name} - set(results)))
            continue
        report.verdicts.append(follows(results[name], base))


def follows(side: Measured, base: Measured) -> Verdict:
    """Whether the time shrinks as the bytes do: the ratio of times over the ratio of bytes, round by round."""
    moved = [
        round_.moved / two.moved for round_, two in zip(side.rounds, base.rounds, strict=True) if two.moved
    ]
    if not moved or not all(moved):
        return Verdict(
            f"time follows bytes: {side.name}", "moves nothing", f"within {TIME_WITHIN:.0%}", False
        )
    expected = [time * share for time, share in zip(base.times, moved, strict=True)]
    ratio = compare(side.times, expected).median
    return Verdict(
        f"time follows bytes: {side.name}, time / (fp32's time x {statistics.median(moved):.3f} of its bytes)",
        str(ratio),
        f"at most {1 + TIME_WITHIN:g}",
        ratio.point <= 1 + TIME_WITHIN,
    )
