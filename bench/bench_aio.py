"""Our I/O engine beside fio, alternating, on the same file.

    python bench/bench_aio.py DIR [--engine io_uring libaio threads] [--pairs 40] [--seconds 1] [--quick]
                              [--pattern random] [--json FILE] [--markdown FILE]

fio is a peer for measuring and nothing else needs it: `apt-get install fio`.

**Disk.** One file in DIR, preallocated and written whole beforehand, read, written, or both half-and-half by fio and
by us in turn; who goes first alternates. What makes the two sides the same:

- File, O_DIRECT, block, depth, pattern, engine: our "threads" meets fio's psync with as many jobs as we have in
  flight, each with a part of the file to itself. With io_uring, fio gets fixedbufs and registerfiles where ours says
  that it registered its buffers and files. Both begin at the start of the file.
- Time: from the first submission to the last completion. Both sides submit for a second and then drain; what is
  drained counts as bytes and as time. fio's start does not count, nor does ours: the worker has its context, sleeping.
- Memory: depth times the block on either side, in huge pages (fio's malloc is told to ask for them; with 4 KiB pages
  it is far slower on some disks). Ours is touched before; what fio reads into is not, a millisecond or two per run.
  Neither changes the data between writes (scramble_buffers=0).
- Clocks: fio keeps latencies, as our histograms do.
- Mixed: fio draws lots for each block; we alternate requests, of which the engine issues the blocks of reads and
  writes in turn, and have twice the memory, so that none is read into and written from at once. Sequential
  requests of ours are `depth` blocks, random ones single blocks.
- Waiting: we submit two batches of 256 blocks and wait for one as a whole before the next is submitted; fio reaps
  blocks one by one. Of either side `depth` blocks are with the kernel.
- Processes: each side is its own, of which fio's jobs are threads, as ours are. CPU seconds are user and system time
  of ours, all threads, against what fio says its jobs took; neither contains start and end, nor kernel threads.

**Overhead.** 64 KiB blocks on a file in memory: fio's io_uring against ours, with requests split in C, and with one
ticket per block in Python. Two places: tmpfs (--ram-dir), where the kernel lends io_uring a worker thread for each
operation because it cannot promise not to block; and the page cache of DIR's file system, reads only, where it can.

**verify.** Checksums on and off, both ours.

Speeds of shared machines swing within minutes; only ratios of one run mean anything. Exit status: 0 when all goals
hold, 1 when one does not, 2 when nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from aio import cells, tables
from aio.cells import MIB, Cell
from aio.ours import Ours
from frame import command, machine
from frame.report import Report
from frame.side import SideError
from rich.console import Console

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob

RAM_FILE = 256 * MIB
QUICK = {"pairs": 2, "seconds": 0.2, "rounds": 2, "size": 256}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Our I/O engine beside fio, alternating, on the same file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument(
        "--engine",
        nargs="+",
        default=["io_uring", "libaio", "threads"],
        help="the first one also does the rest",
    )
    parser.add_argument("--pairs", type=int, default=40, help="pairs of runs per cell on the disk")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a run on the disk")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the overhead and verify parts")
    parser.add_argument("--size", type=int, default=4096, help="the file on the disk, in MiB")
    parser.add_argument("--depth", type=int, default=16, help="blocks in flight on the disk")
    parser.add_argument("--pattern", choices=["sequential", "random"], default="sequential")
    parser.add_argument("--ram-dir", type=Path, default=Path("/dev/shm"), help="a directory on tmpfs")
    parser.add_argument(
        "--part", nargs="+", choices=["disk", "overhead", "verify"], default=["disk", "overhead", "verify"]
    )
    parser.add_argument("--quick", action="store_true", help=f"under a minute, proves nothing: {QUICK}")
    command.add_files(parser, save="")
    arguments = parser.parse_args()
    for directory in (arguments.dir, arguments.ram_dir):
        if not directory.is_dir():
            parser.error(f"{directory} is not a directory")
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def usable(engines: list[str], job: FioJob, report: Report) -> list[str]:
    """The engines that start here; the others are named in the report."""
    usable_engines = []
    for engine in engines:
        try:
            Ours(job, engine).close()
            usable_engines.append(engine)
        except SideError as error:
            report.skipped.append(str(error))
    return usable_engines


def measure(options: argparse.Namespace, directory: Path, report: Report) -> Iterator[Cell]:
    """Every cell that was asked for, as it is done."""
    seconds, rounds = options.seconds, options.rounds
    with cells.warm_file(directory / "disk", options.size * MIB, direct=True) as job:
        job = replace(job, iodepth=options.depth, rw="randread" if options.pattern == "random" else "read")
        engines = usable(options.engine, job, report)
        if not engines:
            return
        first = engines[0]
        for engine in engines if "disk" in options.part else ():
            yield from cells.against_fio(job, engine, options.pairs, seconds)
        if "verify" in options.part:
            yield from cells.verifying(job, "disk", first, rounds, seconds)
    seconds /= 2
    if "overhead" in options.part:
        with cells.warm_file(directory / "cached", RAM_FILE, direct=False) as job:
            yield from cells.overhead(job, "page cache", first, ("read",), rounds, seconds)
    with tempfile.TemporaryDirectory(dir=options.ram_dir, prefix="bench_aio.") as ram:
        direct = machine.takes_direct_io(Path(ram))
        with cells.warm_file(Path(ram) / "ram", RAM_FILE, direct=direct) as job:
            if "overhead" in options.part:
                yield from cells.overhead(job, "tmpfs", first, ("read", "write"), rounds, seconds)
            if "verify" in options.part:
                yield from cells.verifying(job, "tmpfs", first, rounds, seconds)


def main() -> int:
    options = parse_arguments()
    console = Console()
    try:
        peer = fio.version()
    except fio.FioError as missing:
        console.print(missing.message, markup=False)
        return 2
    facts = command.facts("tiering", "numpy", "cffi", directory=options.dir) | {"peer": peer}
    report = Report("bench_aio: our I/O engine beside fio", facts)
    done: list[Cell] = []
    with (
        tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_aio.") as directory,
        console.status("preparing the file") as status,
    ):
        for cell in measure(options, Path(directory).resolve(), report):
            done.append(cell)
            status.update(f"{len(done)} cells; done: {cell.experiment} {cell.engine} {cell.job.rw}")
    tables.fill(report, done)
    raw = {"facts": report.facts, "skipped": report.skipped, "cells": [asdict(cell) for cell in done]}
    command.finish(report, options, "io", lambda: raw)
    return command.status(report, complete=bool(done))


if __name__ == "__main__":
    sys.exit(main())
