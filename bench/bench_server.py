"""Ceilings of the engine at a server's speed, measured on a small machine with stand-ins for drives.

    python bench/bench_server.py [DIR] [--cases loop staging paths driver] [--rounds 9] [--save] [--quick] [--json FILE]

DIR is a directory in memory, where the files of the stand-ins lie. Their transfers take the time of drives, but move no
byte (aio_fault in aio_csrc/aio.h), so that a machine of two cores has the I/O of a server.

**loop.** Optimizer state passes through the staging slots, tiles of 2 Mi elements, over 1 and over 8 drives of 10 GB/s
together. The update itself is left out: what remains is the loop around it. Measured are the CPU time of the thread
that steps, the wall time alone, beside a thread that runs Python without a pause, and beside one that runs C without
the GIL, in turns, and the calls of C. The thread of C shows what a busy CPU core costs. Each call of C releases the
GIL, and another thread takes it in those that last 50 us or longer, and sometimes in shorter ones. Python then takes it
back after 5 ms.

Goals: at most 0.1 ms of CPU time per tile; a busy Python thread costs at most 5 %; at most 4 of the long calls for as
many tiles as take the drives 0.1 s.

**staging.** Every 60th block of one of 8 drives is 150 ms late, with the usual six slots and with slots for 0.1 s of
the drives. More slots make an iteration faster, also while no block is late.

**paths.** Two drives of 7 and 14 GB/s are measured as at the start of training. Then one of 4 paths slows down to a
quarter while extents are written and read: new extents get less of it once that is noticed.

**driver.** One thread drives all files of a context. Its CPU time over eight drives, of 12 to 100 GB/s together: all
but what the kernel does in that thread. Goal: at most half of a core at 50 GB/s. The kernel's part is in bench_aio.py.

Exit status: 0 when all goals hold, 1 when one does not, 2 when there is no result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from frame import command
from frame.report import Report
from frame.rounds import Run
from frame.side import Place, Side
from server import driver, paths, staging, step_loop

CASES: dict[str, ModuleType] = {"loop": step_loop, "staging": staging, "paths": paths, "driver": driver}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Ceilings of the engine at a server's speed, over stand-ins for drives.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "dir", type=Path, nargs="?", default=Path("/dev/shm"), help="a directory in memory, for the stand-ins"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, help="rounds that are kept, instead of 9 or 7")
    command.add_sides(parser, patience=300, threads=1)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1)
    return options


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    facts = command.facts("tiering", "torch") | {"stand-ins": f"in {options.dir}"}
    report = Report("bench_server: ceilings at a server's speed", facts)
    runs = {}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_server.") as directory:
        place = Place(Path(directory).resolve(), options.threads, options.patience)
        for name in options.cases:
            case = CASES[name]
            scale: Any = case.QUICK if options.quick else case.FULL
            if options.rounds and hasattr(scale, "rounds"):
                scale = replace(scale, rounds=options.rounds)
            runs[name] = Run(report, place, scale, Side)
            command.run_cases(runs[name], [(name, case.case)])
    readings = {f"{name}s" if name == "loop" else name: run.sides for name, run in runs.items()}
    command.finish(report, options, "server", lambda: command.readings(report, **readings))
    failed = any(run.failed for run in runs.values())
    return command.status(report, complete=not failed and bool(report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
