"""Late blocks: a step over drives, one of which delivers some blocks late, with six slots and with those of a plan.

A late block keeps its tile in its slot. As soon as all slots are kept, every drive is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from frame.report import Report, Table, Verdict, middle
from frame.rounds import Run
from frame.side import Side, Spec

from tiering.planning.rates import ASSUMED_DISK
from tiering.tierbench.ratios import compare

USUAL, GROWN = "six slots", "slots for 0.1 s"
SMOOTH, LATE = "no block is late", "blocks are late"
MOST_OF_USUAL = 1.0


@dataclass(frozen=True, slots=True)
class Scale:
    """``rate`` is the bandwidth of all drives; every ``late_every``th block of one is ``late`` seconds late."""

    paths: int
    layers: int
    width: int
    host_budget: int
    rate: int
    late: float
    late_every: int
    rounds: int


FULL = Scale(
    paths=8, layers=24, width=2048, host_budget=2 << 30, rate=4 * 10**9, late=0.15, late_every=60, rounds=7
)
QUICK = replace(FULL, layers=24, width=512, host_budget=64 << 20, late=0.01, late_every=4, rounds=1)


@dataclass(frozen=True, slots=True)
class Staged:
    """Seconds of each forward, backward and step, and the seconds that the drives need for its bytes."""

    name: str
    slots: int
    slot_bytes: int
    seconds: list[float]
    least: float


def case(run: Run[Scale, Side]) -> None:
    scale = run.scale
    specs = [
        Spec(f"{slots}, {late}", "server.stand_in", settings=settings(scale, slots, late), on_disk=True)
        for late in (SMOOTH, LATE)
        for slots in (USUAL, GROWN)
    ]
    results = []
    with run.started(specs) as sides:
        turns = {name: partial(iteration, side) for name, side in sides.items()}
        for name, seconds in run.alternate(scale.rounds, turns).items():
            facts = sides[name].facts
            least = facts["bytes"] / scale.rate
            results.append(Staged(name, facts["slots"], facts["slot_bytes"], seconds, least))
    run.sides += results
    run.report.tables.append(table(results))
    judge(run.report, {each.name: each for each in results})


def settings(scale: Scale, slots: str, late: str) -> dict[str, Any]:
    # The plan assumes a rate for each path, which the stand-ins do not have.
    seconds = 0.1 * scale.rate / (scale.paths * ASSUMED_DISK)
    return {
        "paths": scale.paths,
        "rate": scale.rate // scale.paths,
        "layers": scale.layers,
        "width": scale.width,
        "host_budget": scale.host_budget,
        "staging_seconds": seconds if slots == GROWN else 0.0,
        "late": scale.late if late == LATE else 0.0,
        "late_every": scale.late_every,
    }


def iteration(side: Side) -> float:
    seconds: float = side.call("step")[0]["iteration"]
    return seconds


def table(results: list[Staged]) -> Table:
    table = Table(
        "forward, backward and step over eight drives, of which one may be late: ms",
        ("slots", "number", "MiB each", "the drives alone", "an iteration"),
    )
    for each in results:
        table.rows.append(
            (
                each.name,
                str(each.slots),
                f"{each.slot_bytes / (1 << 20):.0f}",
                f"{1e3 * each.least:.0f}",
                middle([1e3 * seconds for seconds in each.seconds], ".0f"),
            )
        )
    return table


def judge(report: Report, results: Mapping[str, Staged]) -> None:
    """More slots may not cost anything while no block is late."""
    for late in (SMOOTH, LATE):
        usual, grown = (results.get(f"{slots}, {late}") for slots in (USUAL, GROWN))
        if usual is None or grown is None:
            continue
        ratio = compare(grown.seconds, usual.seconds).median
        report.verdicts.append(
            Verdict(
                f"an iteration with slots for 0.1 s / with six, {late}",
                str(ratio),
                f"below {MOST_OF_USUAL}",
                ratio.point < MOST_OF_USUAL,
            )
        )
