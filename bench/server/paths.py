"""Paths of different speeds: what is measured at the start, and what a path that slows down costs new extents."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from frame.report import Report, Table, Verdict
from frame.rounds import Run
from frame.side import Side

from tiering.storage import slabs
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.bandwidth import MAX_BYTES, measure
from tiering.storage.swap_space import Section, SwapSpace

LEAST_MEASURED = 0.8
LEAST_GAIN = 1.5
GENERATIONS = (7 * 10**9, 14 * 10**9)
"""Bytes per second of a drive of PCIe 4 and one of PCIe 5."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Extents of ``extent`` bytes on ``paths`` of ``rate``; the last keeps ``slow`` of it after ``fast`` blocks."""

    paths: int
    rate: int
    slow: float
    fast: int
    extent: int
    extents: int


FULL = Scale(paths=4, rate=10**9, slow=0.25, fast=400, extent=64 << 20, extents=12)
QUICK = replace(FULL, rate=10**8, fast=8, extent=4 << 20, extents=4)


@dataclass(frozen=True, slots=True)
class Measured:
    rate: int
    measured: int


@dataclass(frozen=True, slots=True)
class Adapted:
    """Bytes per second of new extents, at each state of the paths."""

    state: str
    rate: float


def case(run: Run[Scale, Side]) -> None:
    measured = [Measured(*pair) for pair in zip(GENERATIONS, measured_rates(GENERATIONS), strict=True)]
    adapted = slowed(run.scale, run.place.directory)
    run.sides += [*measured, *adapted]
    run.report.tables += tables(measured, adapted)
    judge(run.report, measured, adapted)


def measured_rates(rates: tuple[int, ...]) -> list[int]:
    """What the engine measures of stand-ins with these ``rates``, all at once."""
    faults = tuple(
        Fault(count=0, file=number, rate=rate, moves_none=True) for number, rate in enumerate(rates)
    )
    with ExitStack() as stack:
        descriptors = [os.memfd_create(f"path{number}") for number in range(len(rates))]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        with AioContext(fault=FaultPlan(faults)) as aio:
            files = [aio.add_file(fd, direct=False, name=f"path{at}") for at, fd in enumerate(descriptors)]
            return measure(aio, [(file, MAX_BYTES) for file in files])


def slowed(scale: Scale, directory: Path) -> list[Adapted]:
    """The speed of new extents while all paths are equal, when one has slowed down, and when that was noticed."""
    paths = [directory / f"path{number}" for number in range(scale.paths)]
    for path in paths:
        path.mkdir()
    last = scale.paths - 1
    faults = (
        Fault(count=scale.fast, file=last, rate=scale.rate, moves_none=True),
        Fault(count=0, file=last, rate=int(scale.rate * scale.slow), moves_none=True),
        *(Fault(count=0, file=number, rate=scale.rate, moves_none=True) for number in range(last)),
    )
    known, slabs.measure = slabs.measure, lambda _, files: [scale.rate] * len(files)
    try:
        with AioContext(fault=FaultPlan(faults)) as aio:
            section = Section(4 * scale.extent, tuple(paths))
            space = SwapSpace({"activations": section}, aio, allow_memory_file_system=True)
            try:
                return _states(scale, space, aio)
            finally:
                aio.close()
                space.close()
    finally:
        slabs.measure = known


def _states(scale: Scale, space: SwapSpace, aio: AioContext) -> list[Adapted]:
    lease = Arena.map(scale.extent, "activations").lease(scale.extent, "activations")
    (speed,) = [space.speeds.paths[str(space.slabs[-1].directory)]]

    def passing() -> float:
        """Bytes per second of extents that are written, read and freed."""
        began = time.perf_counter()
        for _ in range(scale.extents):
            extent = space.allocate(scale.extent, ("activation",), "activations")
            space.swap_out(extent, lease).wait()
            space.swap_in(extent, lease).wait()
            space.free(extent)
        return 2 * scale.extents * scale.extent / (time.perf_counter() - began)

    def moved() -> int:
        stats = aio.stats()[-1]
        return stats.read.ops + stats.write.ops

    states = [Adapted("all paths are equal", passing())]
    while moved() <= scale.fast:
        passing()
    states.append(Adapted(f"one path has {scale.slow:.0%} of its speed", passing()))
    for _ in range(50):
        passing()
        space.observe(aio.stats())
        if speed.is_slow:
            break
    states.append(Adapted("this was noticed", passing()))
    return states


def tables(measured: list[Measured], adapted: list[Adapted]) -> list[Table]:
    rates = Table("drives of two generations, measured together: GB/s", ("drive", "measured"))
    rates.rows += [(f"{each.rate / 1e9:g}", f"{each.measured / 1e9:.2f}") for each in measured]
    speeds = Table("new extents over paths of which one slows down: GB/s", ("paths", "written and read"))
    speeds.rows += [(each.state, f"{each.rate / 1e9:.2f}") for each in adapted]
    return [rates, speeds]


def judge(report: Report, measured: list[Measured], adapted: list[Adapted]) -> None:
    slower, faster = measured
    part = faster.measured / slower.measured / (faster.rate / slower.rate)
    _, slow, noticed = adapted
    report.verdicts += [
        Verdict(
            "measured ratio of two generations / their ratio",
            f"{part:.2f}",
            f"at least {LEAST_MEASURED}",
            part >= LEAST_MEASURED,
        ),
        Verdict(
            "speed of new extents after a slow path is noticed / before",
            f"{noticed.rate / slow.rate:.2f}",
            f"at least {LEAST_GAIN}",
            noticed.rate >= LEAST_GAIN * slow.rate,
        ),
    ]
