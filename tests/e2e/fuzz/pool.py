"""Many programs, over several processes."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from .compare import Tally, check, shrunk
from .program import Program, keep_files_in

CHUNK = 20  # programs that a process takes at a time
ROUND = 20  # chunks for each process, until there are new ones
STUCK_AFTER_SECONDS = 600


def work(seeds: range, directory: str | None) -> Tally:
    """What comes of these seeds: a Tally. Runs in a process of its own."""
    faulthandler.dump_traceback_later(STUCK_AFTER_SECONDS, exit=True)
    if directory is not None:
        keep_files_in(Path(directory))
    tally = Tally()
    for seed in seeds:
        faulthandler.dump_traceback_later(STUCK_AFTER_SECONDS, exit=True)
        result = check(Program.draw(seed))
        result.failures = [shrunk(failure) for failure in result.failures]
        tally.add(result)
    faulthandler.cancel_dump_traceback_later()
    return tally


def many(first: int, count: int, jobs: int, directory: str | None) -> int:
    total, began = Tally(), time.monotonic()
    chunks = [range(at, min(at + CHUNK, first + count)) for at in range(first, first + count, CHUNK)]
    for at in range(0, len(chunks), ROUND * jobs):
        for tally in _round(chunks[at : at + ROUND * jobs], jobs, directory):
            total.add(tally)
            for failure in tally.failures:
                print(f"FAILURE\n{failure}\n", flush=True)
            if total.programs % 200 == 0:
                print(f"{time.monotonic() - began:.0f} s: {total}", flush=True)
    print(f"{time.monotonic() - began:.0f} s, seeds {first} to {first + count - 1}: {total}")
    return 1 if total.failures else 0


def _round(chunks: list[range], jobs: int, directory: str | None) -> Iterator[Tally]:
    """What comes of ``chunks``, as it comes. Processes are made anew for each round: their memory grows slowly."""
    # Not by max_tasks_per_child: with all work submitted at once, Python 3.11 makes no process in place of the last.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, chunk, directory) for chunk in chunks]):
            yield done.result()
