"""A block that is larger than the device, in tiles, beside the same in memory.

    python bench/bench_tiles.py DIR [--rounds 3] [--save] [--quick] [--json FILE]

DIR is a directory on the disk that holds the state.

The demo's GPT in bf16 with one block of 1.6 GB, whose largest matrix has 512 MiB, trains within a device budget of
96 MiB and a host budget of 256 MiB: `tiering.tile` cuts its matrices into tiles of 16 MiB, and everything else is on
NVMe. Beside it the same model in the same tiles with all the memory that it wants. Each side is a process of its own
and takes one step per round, in an order that rotates; fio runs in the same rounds, half of its bytes reads.

Goals: weights have the same bits; a step moves the bytes of the plan; the peak of RSS is within the budgets and a
constant; a step takes at most 1.15 times the step in memory and fio's time for its bytes, one after the other.

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
from frame.side import Place, Side
from tiles.case import FULL, QUICK, Sides, case


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A block that is larger than the device, in tiles, beside the same in memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, help="a directory on the disk that holds the state")
    parser.add_argument("--rounds", type=int, help=f"rounds that are kept, instead of {FULL.rounds}")
    command.add_sides(parser, patience=600)
    command.add_files(parser)
    options = parser.parse_args()
    command.require_at_least(parser, options, rounds=1)
    return options


def main() -> int:
    options = parse_arguments()
    command.end_on_sigterm()
    scale = QUICK if options.quick else FULL
    scale = replace(scale, rounds=options.rounds or scale.rounds)
    facts = command.facts("tiering", "torch", directory=options.dir)
    facts |= {"threads": f"{options.threads} for each side", "model": str(scale.model)}
    report = Report("bench_tiles: a block that is larger than the device", facts)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench_tiles.") as directory:
        place = Place(Path(directory).resolve(), options.threads, options.patience)
        run = Sides(report, place, scale, Side)
        command.run_cases(run, [("tiles", case)])
    command.finish(report, options, "tiles", lambda: command.readings(report, sides=run.sides))
    return command.status(report, complete=not run.failed and bool(report.verdicts))


if __name__ == "__main__":
    sys.exit(main())
