"""fio at a plan's own ratio of reads to writes: what this disk gives to such a mix, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from aio.beside import file_for_fio
from frame.measured import Beside
from frame.side import Side

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading

from .measured import StepRun


@contextmanager
def peer_disk(run: StepRun) -> Iterator[Beside]:
    """Makes a fio for each side that has a plan with bytes on NVMe, by the I/O engine of the side; none without fio."""
    with file_for_fio(run, run.scale.fio_file) as job:
        if job is None:
            yield lambda sides: {}
        else:
            yield partial(_beside, replace(job, rw="rw"), run.scale.fio_seconds)


def read_percent(side: Side) -> int:
    """The share of reads in the bytes that a step moves."""
    read: int
    written: int
    read, written = side.facts["planned_read"], side.facts["planned_written"]
    return round(100 * read / (read + written))


def _beside(job: FioJob, seconds: float, sides: Mapping[str, Side]) -> dict[str, Callable[[], RunReading]]:
    runs: dict[str, Callable[[], RunReading]] = {}
    for name, side in sides.items():
        if side.facts.get("planned_read"):
            mixed = replace(job, rwmixread=read_percent(side))
            runs[name] = partial(
                fio.run, mixed, side.facts["io_engine"], tuple(side.facts["io_flags"]), seconds
            )
    return runs
