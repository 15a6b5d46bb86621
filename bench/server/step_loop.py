"""The loop that steps tiles: its Python, its calls of C, and what a busy Python thread costs it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from frame.report import Report, Table, Verdict, middle
from frame.rounds import Run
from frame.side import Side, Spec

from tiering.tierbench.ratios import compare

from .stand_in import NATIVE, PYTHON

MOST_PYTHON = 0.1e-3
MOST_SLOWER = 1.05
MOST_CALLS = 4.0
DISK_SECONDS = 0.1
"""A run of tiles is worth so long of the drives' time."""
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Scale:
    """``rate`` is the bandwidth of all drives together; a layer of ``width`` 2048 has 4 Mi elements, or two tiles."""

    paths: tuple[int, ...]
    layers: int
    width: int
    host_budget: int
    rate: int
    rounds: int


FULL = Scale(paths=(1, 8), layers=24, width=2048, host_budget=900 << 20, rate=10_000_000_000, rounds=9)
QUICK = replace(FULL, layers=4, width=512, host_budget=16 << 20, rounds=1)


@dataclass(frozen=True, slots=True)
class Loop:
    """What was measured over ``paths`` drives: seconds per tile of each round, and the calls of C of one step.

    ``busy`` are those beside a thread of Python, and ``native`` those beside a thread of C.
    ``long_calls`` are those that last so long that another thread takes the GIL.
    """

    paths: int
    tiles: int
    bytes: int
    rate: int
    python: list[float]
    alone: list[float]
    busy: list[float]
    native: list[float]
    calls: dict[str, int]
    long_calls: dict[str, int]

    @property
    def hand_overs(self) -> float:
        """Long calls of C for as many tiles as take the drives DISK_SECONDS: in each, another thread takes the GIL."""
        return sum(self.long_calls.values()) / (self.bytes / self.rate / DISK_SECONDS)


def name_of(paths: int) -> str:
    return "1 drive" if paths == 1 else f"{paths} drives"


def case(run: Run[Scale, Side]) -> None:
    scale = run.scale
    specs = []
    for paths in scale.paths:
        settings: dict[str, Any] = {
            "paths": paths,
            "rate": scale.rate // paths,
            "layers": scale.layers,
            "width": scale.width,
            "host_budget": scale.host_budget,
        }
        specs.append(Spec(name_of(paths), "server.stand_in", settings=settings, on_disk=True))
    with run.started(specs) as sides:
        turns = {
            f"{name}, {beside or ALONE}": partial(step, side, beside)
            for name, side in sides.items()
            for beside in (None, PYTHON, NATIVE)
        }
        readings = run.alternate(scale.rounds, turns)
        for paths in scale.paths:
            name = name_of(paths)
            alone, busy, native = (readings.get(f"{name}, {way}") for way in (ALONE, PYTHON, NATIVE))
            if alone and busy and native:
                counted = step(sides[name], count=True)
                moved = sides[name].facts["bytes"]
                run.sides.append(loop_of(paths, moved, scale.rate, alone, busy, native, counted))
    run.report.tables.append(table(run.sides))
    judge(run.report, run.sides)


def step(side: Side, beside: str | None = None, *, count: bool = False) -> dict[str, Any]:
    reading: dict[str, Any] = side.call("step", beside=beside, count=count)[0]
    return reading


def loop_of(
    paths: int,
    moved: int,
    rate: int,
    alone: list[dict[str, Any]],
    busy: list[dict[str, Any]],
    native: list[dict[str, Any]],
    counted: Mapping[str, Any],
) -> Loop:
    def per_tile(readings: list[dict[str, Any]], figure: str) -> list[float]:
        return [reading[figure] / reading["tiles"] for reading in readings]

    return Loop(
        paths=paths,
        tiles=alone[0]["tiles"],
        bytes=moved,
        rate=rate,
        python=per_tile(alone, "cpu"),
        alone=per_tile(alone, "wall"),
        busy=per_tile(busy, "wall"),
        native=per_tile(native, "wall"),
        calls=counted["calls"],
        long_calls=counted["long_calls"],
    )


def table(loops: list[Loop]) -> Table:
    table = Table(
        "the loop that steps tiles, without the update: ms per tile",
        (
            "drives",
            "tiles per step",
            "MB per tile",
            "CPU of the thread",
            "wall",
            "wall beside a busy thread of Python",
            "of C",
            "calls of C per tile",
            "long ones",
        ),
    )
    for loop in loops:
        table.rows.append(
            (
                name_of(loop.paths),
                str(loop.tiles),
                f"{loop.bytes / loop.tiles / 1e6:.1f}",
                middle([1e3 * each for each in loop.python]),
                middle([1e3 * each for each in loop.alone], ".2f"),
                middle([1e3 * each for each in loop.busy], ".2f"),
                middle([1e3 * each for each in loop.native], ".2f"),
                f"{sum(loop.calls.values()) / loop.tiles:.1f}",
                f"{sum(loop.long_calls.values()) / loop.tiles:.2f}",
            )
        )
        most = ", ".join(f"{name} {number}" for name, number in Counter(loop.calls).most_common(4))
        table.notes.append(f"Calls of C in a step over {name_of(loop.paths)}: {most}.")
    return table


def judge(report: Report, loops: list[Loop]) -> None:
    for loop in loops:
        drives = name_of(loop.paths)
        python = statistics.median(loop.python)
        ratio = compare(loop.busy, loop.alone).median
        report.verdicts += [
            Verdict(
                f"CPU of the thread per tile, {drives}",
                f"{1e3 * python:.3f} ms",
                f"at most {1e3 * MOST_PYTHON} ms",
                python <= MOST_PYTHON,
            ),
            Verdict(
                f"the loop beside a busy Python thread / alone, {drives}",
                str(ratio),
                f"at most {MOST_SLOWER}",
                ratio.point <= MOST_SLOWER,
            ),
            Verdict(
                f"calls of C in which another thread takes the GIL, per {DISK_SECONDS} s of the drives, {drives}",
                f"{loop.hand_overs:.1f}",
                f"at most {MOST_CALLS:.0f}",
                loop.hand_overs <= MOST_CALLS,
            ),
        ]
