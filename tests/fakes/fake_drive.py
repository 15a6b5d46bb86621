"""Drives for a sweep that take no time: rates of settings, swings, noise, and what they lack."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from tiering.tierbench.load.windows import Watch
from tiering.tierbench.result import Sample
from tiering.tierbench.tuning.explore import SearchEnded, SettingFigures, SettingUnavailable, explore
from tiering.tierbench.tuning.search import Cell, Grid, Sweep

K, M = 1 << 10, 1 << 20
HOME = Cell("io_uring", M, 16, registered=True)
GRID = Grid(
    HOME,
    (("io_uring", True), ("io_uring", False), ("libaio", True), ("threads", True)),
    (128 * K, 256 * K, 512 * K, M, 2 * M, 4 * M),
    (4, 8, 16, 32, 64),
)
SECONDS = 0.5  # of a window
DISTURBANCE = 0.35


def flat(cell: Cell) -> float:
    return 1.0


def peaked(cell: Cell) -> float:
    """Best with libaio, 256K and 64 blocks, where it is 1.6; the defaults are not far from 1."""
    away = abs(math.log2(cell.bs / (256 * K))) + abs(math.log2(cell.iodepth / 64))
    return 1.6 * math.exp(-0.09 * (away + (cell.ioengine != "libaio")))


def suited(cell: Cell) -> float:
    """The defaults are best."""
    away = abs(math.log2(cell.bs / M)) + abs(math.log2(cell.iodepth / 16))
    return math.exp(-0.1 * away) * (0.8 if cell.ioengine == "threads" else 1.0)


class FakeDrive:
    """Rates after ``truth``, times a swing of up to twofold either way, times noise of each window.

    A share of the windows is ``disturbed``: their noise is that of a machine whose CPUs others take.
    """

    def __init__(
        self,
        truth: Callable[[Cell], float],
        *,
        seed: int = 0,
        noise: float = 0.05,
        disturbed: float = 0.0,
        swings: bool = True,
    ) -> None:
        self.truth, self.noise, self.disturbed, self.swings = truth, noise, disturbed, swings
        self.random = random.Random(seed)
        self.now, self.swing = 0.0, 0.0
        self.seen: list[Cell] = []
        self.missing: tuple[str, ...] = ()
        self.windows = 10**9

    def measure(self, cell: Cell | None, tell: Watch | None) -> SettingFigures:
        cell = cell or HOME
        if cell.ioengine in self.missing:
            raise SettingUnavailable(f"{cell.ioengine} is not to be had")
        if len(self.seen) == self.windows:
            raise SearchEnded("it is enough")
        self.now += SECONDS
        self.seen.append(cell)
        decay = math.exp(-SECONDS / 20)
        self.swing = self.swing * decay + self.random.gauss(0, 0.35 * math.sqrt(1 - decay**2))
        factor = math.exp(max(-0.69, min(0.69, self.swing))) if self.swings else 1.0
        disturbed = self.disturbed and self.random.random() < self.disturbed
        noise = DISTURBANCE if disturbed else self.noise
        rate = 3e9 * self.truth(cell) * factor * math.exp(self.random.gauss(0, noise))
        if tell is not None:
            tell(Sample(at=SECONDS, read=rate, write=0.0), 1.0)
        return SettingFigures(rate, cpu_per_gb=1e4 / cell.bs, p99=cell.in_flight / rate)


def played(drive: FakeDrive, budget: float = 60.0) -> tuple[Sweep, str]:
    sweep = Sweep(GRID)
    return sweep, explore(drive, sweep, until=budget, clock=lambda: drive.now)
