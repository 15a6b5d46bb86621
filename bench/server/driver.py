"""The driver thread of an I/O context: what it takes of a core over eight drives, without the kernel's part."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from frame.process import driver_seconds
from frame.report import Report, Table, Verdict, middle
from frame.rounds import Run
from frame.side import Side

from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.storage.tickets import Ticket

MOST_CORES = 0.5
SERVER = 50 * 10**9
"""Bytes per second of eight drives of PCIe 4."""
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """Reads at ``rate`` bytes per second of all drives together, 0 for no limit; ``verify``: with checksums."""

    rate: int
    verify: bool = False

    def __str__(self) -> str:
        rate = f"{self.rate / 1e9:g}" if self.rate else "no limit"
        return f"{rate}, checksums" if self.verify else rate


@dataclass(frozen=True, slots=True)
class Scale:
    """Two requests of ``request`` bytes for each of ``paths`` drives are under way for ``seconds``."""

    loads: tuple[Load, ...]
    paths: int
    request: int
    seconds: float
    rounds: int


FULL = Scale(
    loads=(
        *(Load(rate) for rate in (SERVER // 4, SERVER // 2, SERVER, 2 * SERVER, 0)),
        Load(SERVER // 4, True),
    ),
    paths=8,
    request=16 * BLOCK,
    seconds=1.0,
    rounds=5,
)
QUICK = replace(FULL, loads=(Load(SERVER), Load(SERVER // 4, True)), seconds=0.1, rounds=1)


@dataclass(slots=True)
class Driven:
    """The bytes per second of each round of a load, and the part of a core that the driver took."""

    load: Load
    rates: list[float]
    cores: list[float]

    @property
    def per_block(self) -> list[float]:
        """CPU seconds of the driver for a block of 1 MiB."""
        return [cores / (rate / BLOCK) for rate, cores in zip(self.rates, self.cores, strict=True)]


def case(run: Run[Scale, Side]) -> None:
    driven = [Driven(load, [], []) for load in run.scale.loads]
    for _ in range(run.scale.rounds):
        for each in driven:
            rate, cores = drive(run.scale, each.load)
            each.rates.append(rate)
            each.cores.append(cores)
    run.sides += driven
    run.report.tables.append(table(driven))
    judge(run.report, driven)


def drive(scale: Scale, load: Load) -> tuple[float, float]:
    """Bytes per second, and CPU seconds of the driver per second."""
    faults = tuple(
        Fault(count=0, file=path, rate=load.rate // scale.paths, moves_none=True)
        for path in range(scale.paths)
    )
    with ExitStack() as stack:
        descriptors = [os.memfd_create(f"path{path}") for path in range(scale.paths)]
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        aio = stack.enter_context(AioContext(fault=FaultPlan(faults), verify=load.verify))
        files = [aio.add_file(fd, direct=False, name=f"path{at}") for at, fd in enumerate(descriptors)]
        memory = Arena.map(2 * scale.paths * scale.request, "bench")
        turns = [[memory.lease(scale.request, "bench") for _ in files] for _ in range(2)]
        if load.verify:  # the sums that are compared
            for file in files:
                aio.write(file, turns[0][file], 0, scale.request).wait()

        def submit(turn: int) -> list[Ticket]:
            return [aio.read(file, turns[turn][file], 0, scale.request) for file in files]

        moved, turn, cpu, began = 0, 0, driver_seconds(), time.perf_counter()
        under_way = [submit(0), submit(1)]
        while (seconds := time.perf_counter() - began) < scale.seconds:
            for ticket in under_way[turn]:
                moved += ticket.wait()
            under_way[turn] = submit(turn)
            turn = 1 - turn
        return moved / seconds, (driver_seconds() - cpu) / seconds


def table(driven: list[Driven]) -> Table:
    table = Table(
        "the driver thread over eight drives, without the kernel's part",
        ("GB/s of the drives", "GB/s moved", "part of a core", "us per MiB"),
    )
    for each in driven:
        table.rows.append(
            (
                str(each.load),
                middle([rate / 1e9 for rate in each.rates], ".1f"),
                middle(each.cores, ".2f"),
                middle([1e6 * seconds for seconds in each.per_block], ".2f"),
            )
        )
    return table


def judge(report: Report, driven: list[Driven]) -> None:
    (server,) = [each for each in driven if each.load == Load(SERVER)]
    cores = statistics.median(server.cores)
    report.verdicts.append(
        Verdict(
            f"part of a core that the driver takes at {SERVER / 1e9:g} GB/s",
            f"{cores:.2f}",
            f"at most {MOST_CORES}",
            cores <= MOST_CORES,
        )
    )
