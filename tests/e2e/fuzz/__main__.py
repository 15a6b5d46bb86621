"""Compare random programs over placements: ``python -m tests.e2e.fuzz --programs 5000 --jobs 2``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path


def repeat(seed: int, placement: str | None, directory: str | None) -> int:
    """One program again, with all of an error."""
    from .compare import check, shrunk
    from .program import Program, keep_files_in

    if directory is not None:
        keep_files_in(Path(directory))
    program = Program.draw(seed)
    if placement is not None:
        chosen = () if placement == "plain" else (program.placements[int(placement)],)
        program = replace(program, placements=chosen)
    print(program)
    tally = check(program, plainly=placement in (None, "plain"))
    for failure in tally.failures:
        print(shrunk(failure))
    print(tally)
    return 1 if tally.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--directory", help="where files are kept: on a disk, not on tmpfs")
    parser.add_argument("--seed", type=int, help="repeat the program of one seed")
    parser.add_argument(
        "--placement", help="with --seed: the index of a placement, or 'plain' for the plain loop"
    )
    options = parser.parse_args()
    os.environ["TIERING_DEVICE"] = "cpu"
    if options.seed is not None:
        return repeat(options.seed, options.placement, options.directory)
    from .pool import many

    return many(options.first, options.programs, options.jobs, options.directory)


if __name__ == "__main__":
    sys.exit(main())
