"""Ceilings of the engine at a server's speed, measured on a small machine with stand-ins for drives.

    python bench/bench_server.py [DIR] [--rounds 9] [--save] [--quick] [--json FILE]

DIR is a directory in memory, where the files of the stand-ins lie. Their transfers take the time of drives, but move no
byte (aio_fault in aio_csrc/aio.h), so that a machine of two cores has the I/O of a server.

**loop.** Optimizer state passes through the staging slots, tiles of 2 Mi elements, over 1 and over 8 drives of 10 GB/s
together. The update itself is left out: what remains is the loop around it. Measured are the CPU time of the thread
that steps, the wall time alone and beside a thread that runs Python without a pause, in turns, and the calls of C. Each
releases the GIL, and another thread takes it in those that last 50 us or longer.

Goals: at most 0.1 ms of CPU time per tile; a busy Python thread costs at most 5 %; at most 4 of the long calls for as
many tiles as take the drives 0.1 s.

Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from frame import command
from frame.report import Report
from frame.rounds import Run
from frame.side import Place, Side
from server.step_loop import FULL, QUICK, Scale, case


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ceilings of the engine at a server's speed, over stand-ins for drives.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "dir", type=Path, nargs="?", default=Path("/dev/shm"), help="a directory in memory, for the stand-ins"
    )
    parser.add_argument("--rounds", type=int, help=f"rounds that are kept, instead of {FULL.rounds}")
    command.add_sides(parser, patience=300, threads=1)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1)
    return options


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    scale = QUICK if options.quick else FULL
    scale = replace(scale, rounds=options.rounds or scale.rounds)
    facts = command.facts("tiering", "torch")
    facts |= {"stand-ins": f"in {options.dir}, {scale.rate / 1e9:g} GB/s together"}
    report = Report("bench_server: ceilings at a server's speed", facts)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_server.") as directory:
        place = Place(Path(directory).resolve(), options.threads, options.patience)
        run: Run[Scale, Side] = Run(report, place, scale, Side)
        command.run_cases(run, [("loop", case)])
    command.finish(report, options, "server", lambda: command.readings(report, loops=run.sides))
    return command.status(report, complete=not run.failed and bool(report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
