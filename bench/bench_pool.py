"""The kernels' threads: what a wake-up costs, and how much of a large run's speed a tile of the NVMe step reaches.

    python bench/bench_pool.py [--threads 1 2] [--rounds 301] [--save] [--quick] [--json FILE]

Part wake: a run of 40,000 elements that are in the cache, on one thread (t1) and on two (t2), alternating. The second
thread takes tiles from the moment at which it has joined: so t2 = (t1 + wake-up) / 2. With a step under way, idle
threads spin between runs, if the threads leave a CPU free.

Part tile: AdamW on tiles of 2 Mi elements, one run for each as the step over NVMe makes them, beside one run over all
elements, for each number of threads, alternating. The efficiency is the ratio of their rates.

Part projection is arithmetic: the same tile on more threads than this machine has, with the measured wake-up. Each
thread has an equal part of the memory's bandwidth (--memory); a thread that idles leaves its part unused, as cores
behind one memory channel or chiplet do. Beside it the same with tiles of a fixed size of 32 Ki elements.

Goals: a tile reaches 0.9 of the rate of the large run on each number of threads up to the CPUs; by the projection, 0.8
on 96 threads that spin.

Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no result.
"""

from __future__ import annotations

import argparse
import heapq
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from frame import command
from frame.report import Report, Table, Verdict

from optim_cpu import kernels
from optim_cpu.kernels import DType, StepBatch
from tiering._text import counted

QUICK = {"rounds": 5, "elements": 4 << 20}
SMALL = 40_000
TILE = 2 << 20
BYTES = 28
"""Read and written for an element: three float32 arrays, a gradient and a copy of the parameter in bf16."""
LARGEST, SMALLEST, IN_A_SHARE = 1 << 15, kernels.SQUARE_BLOCK, 4
"""The bounds of the pool's tiles, and how many each thread has between them (optim_cpu/csrc/pool.c, kernels.c)."""
FAN_OUT = 2
GOAL, GOAL_OF_MANY, MANY = 0.9, 0.8, 96


@dataclass(frozen=True, slots=True)
class Wake:
    """Microseconds of a small run on one and on two threads, and what that makes a wake-up cost."""

    when: str
    one: float
    two: float

    @property
    def wake(self) -> float:
        return max(0.0, 2 * self.two - self.one)


@dataclass(frozen=True, slots=True)
class Tiles:
    """GB/s of one large run and of tiles, the medians of all rounds, on a number of threads."""

    threads: int
    whole: float
    tiles: float
    spread: float

    @property
    def efficiency(self) -> float:
        return self.tiles / self.whole


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The kernels' threads: wake-ups and the efficiency of tiles.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cpus = len(os.sched_getaffinity(0))
    usual = sorted({1 << i for i in range(cpus.bit_length())} | {cpus})
    parser.add_argument("--threads", type=int, nargs="+", default=usual, help="numbers of threads")
    parser.add_argument(
        "--rounds", type=int, default=31, help="of the part tile; the part wake has 20 times as many"
    )
    parser.add_argument("--elements", type=int, default=32 << 20, help="of the large run")
    parser.add_argument("--memory", type=float, default=400.0, help="GB/s of memory, in the projection")
    parser.add_argument("--projected", type=int, nargs="+", default=[48, 64, MANY, 128, 256], help="threads")
    parser.add_argument("--quick", action="store_true", help=f"a few seconds, proves nothing: {QUICK}")
    command.add_files(parser)
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    command.require_at_least(parser, options, rounds=1, elements=TILE)
    return options


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def wakes(rounds: int) -> list[Wake]:
    """With and without a step under way."""
    source, target = np.zeros(SMALL, np.float32), np.zeros(SMALL, np.float32)

    def run() -> None:
        kernels.accumulate(
            target.ctypes.data, DType.FP32, source.ctypes.data, DType.FP32, SMALL, overwrite=False
        )

    measured = []
    contexts: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "between steps": nullcontext,
        "step under way": kernels.step_under_way,
    }
    for when, context in contexts.items():
        times: dict[int, list[float]] = {1: [], 2: []}
        with context():
            for threads in (1, 2) * rounds:
                kernels.set_thread_count(threads)
                run()
                times[threads] += [seconds(run) for _ in range(5)]
        one, two = (1e6 * statistics.median(times[threads]) for threads in (1, 2))
        measured.append(Wake(when, one, two))
    return measured


class Model:
    """The arrays of an AdamW with gradients and compute parameters in bf16."""

    def __init__(self, elements: int) -> None:
        self.elements = elements // TILE * TILE
        self.state = [np.full(self.elements, 0.1, np.float32) for _ in range(3)]
        self.grad, self.out = (np.zeros(self.elements, np.uint16) for _ in range(2))

    def batch(self, begin: int, elements: int) -> StepBatch:
        batch, rule = (
            StepBatch(),
            kernels.adam(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10),
        )
        master, *moments = (array.ctypes.data + 4 * begin for array in self.state)
        batch.add(
            elements,
            batch.add_rule(rule),
            param=master,
            grad=self.grad.ctypes.data + 2 * begin,
            grad_dtype=DType.BF16,
            state=tuple(moments),
            out=self.out.ctypes.data + 2 * begin,
        )
        return batch


def tiles(model: Model, threads: int, rounds: int) -> Tiles:
    kernels.set_thread_count(threads)
    whole = model.batch(0, model.elements)
    parts = [model.batch(begin, TILE) for begin in range(0, model.elements, TILE)]

    def run_parts() -> None:
        with kernels.step_under_way():
            for part in parts:
                part.run()

    whole.run()
    times = [(seconds(whole.run), seconds(run_parts)) for _ in range(rounds)]
    rates = [model.elements * BYTES / 1e9 / statistics.median(side) for side in zip(*times, strict=True)]
    ratios = sorted(one / other for one, other in times)
    spread = ratios[-1 - len(ratios) // 4] - ratios[len(ratios) // 4]
    return Tiles(threads, rates[0], rates[1], spread)


def tile_of(threads: int) -> int:
    """Elements of the pool's tiles in a run over TILE elements."""
    tile = TILE // (IN_A_SHARE * threads) // SMALLEST * SMALLEST
    return min(max(tile, SMALLEST), LARGEST)


def projected(threads: int, tile: int, wake: float, memory: float) -> float:
    """The efficiency of a run over TILE elements on ``threads``, in tiles of ``tile``, after wake-ups of ``wake`` us.

    A thread that has joined wakes FAN_OUT others; each thread takes the next tile as it becomes free.
    """
    one = tile * BYTES / (memory * 1e3 / threads)  # microseconds of a tile on a thread
    joined = [wake * int(math.log(1 + i * (FAN_OUT - 1), FAN_OUT) + 1e-9) for i in range(threads)]
    heapq.heapify(joined)
    last = 0.0
    for _ in range(-(-TILE // tile)):
        last = max(last, heapq.heapreplace(joined, joined[0] + one) + one)
    return TILE * BYTES / (memory * 1e3) / last


def fill(report: Report, options: argparse.Namespace, woken: Sequence[Wake], ran: Sequence[Tiles]) -> None:
    table = Table(
        "wake: a run of 40,000 elements in the cache", ("", "1 thread, us", "2 threads, us", "wake-up, us")
    )
    table.rows = [(w.when, f"{w.one:.1f}", f"{w.two:.1f}", f"{w.wake:.1f}") for w in woken]
    spins = len(os.sched_getaffinity(0)) > 2
    if not spins:
        table.notes.append(
            "Two threads leave no CPU free here: they do not spin, and both rows measure the same."
        )
    report.tables.append(table)
    table = Table(
        "tile: AdamW, GB/s",
        ("threads", "one run", "tiles of 2 Mi", "efficiency", "half of the rounds within"),
    )
    for each in ran:
        row = (f"{each.threads}", f"{each.whole:.1f}", f"{each.tiles:.1f}", f"{each.efficiency:.3f}")
        table.rows.append((*row, f"{each.spread:.3f}"))
        report.verdicts.append(
            Verdict(
                f"tile / one run, {counted(each.threads, 'thread')}",
                f"{each.efficiency:.3f}",
                f">= {GOAL}",
                each.efficiency >= GOAL,
            )
        )
    report.tables.append(table)
    asleep = woken[0].wake
    columns = ("threads", "tile", "spinning", "asleep", "fixed tiles, spinning", "fixed tiles, asleep")
    table = Table(f"projection: efficiency of a tile of 2 Mi, memory of {options.memory:g} GB/s", columns)
    for threads in options.projected:
        sizes = (tile_of(threads), LARGEST)
        cells = [
            f"{projected(threads, size, wake, options.memory):.2f}"
            for size in sizes
            for wake in (0.0, asleep)
        ]
        table.rows.append((f"{threads}", f"{sizes[0] >> 10} Ki", *cells))
    table.notes.append(
        f"A wake-up is the measured {asleep:.1f} us; a thread that spins is counted as joined at once."
    )
    report.tables.append(table)
    found = projected(MANY, tile_of(MANY), 0.0, options.memory)
    report.verdicts.append(
        Verdict(f"projection for {MANY} threads", f"{found:.2f}", f">= {GOAL_OF_MANY}", found >= GOAL_OF_MANY)
    )


def main() -> int:
    options = parse_arguments()
    facts = command.facts("tiering", "numpy") | {"instruction set": kernels.instruction_set()}
    report = Report("bench_pool: the kernels' threads", facts)
    try:
        woken = wakes(20 * options.rounds)
        model = Model(options.elements)
        ran = [tiles(model, threads, options.rounds) for threads in options.threads]
    finally:
        kernels.set_thread_count(None)
    fill(report, options, woken, ran)
    command.finish(report, options, "pool", lambda: command.readings(report, wakes=woken, tiles=ran))
    return command.status(report, complete=bool(ran))


if __name__ == "__main__":
    sys.exit(main())
