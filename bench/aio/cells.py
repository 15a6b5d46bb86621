"""The measurements: cells of readings, every side in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob, RunReading
from tiering.tierbench.ratios import take_turns
from tiering.tierbench.words import ReadWrite, is_random

from .ours import Ours

MIB = 1 << 20
SMALL = 64 << 10

SEQUENTIAL: tuple[ReadWrite, ...] = ("read", "write", "rw")
RANDOM: tuple[ReadWrite, ...] = ("randread", "randwrite", "randrw")


@dataclass(slots=True)
class Cell:
    """``sides[name][i]`` is what side ``name`` did in round i of ``job``.

    ``place`` is where the file lies; ``fio_idle_cpu`` the CPU seconds of a fio that starts, waits and ends.
    """

    experiment: Literal["disk", "overhead", "verify"]
    place: str
    engine: str
    flags: tuple[str, ...]
    job: FioJob
    sides: dict[str, list[RunReading]] = field(default_factory=dict)
    fio_command: str = ""
    fio_idle_cpu: float = 0.0


@contextmanager
def warm_file(path: Path, size: int, *, direct: bool) -> Iterator[FioJob]:
    """A file of ``size`` bytes, preallocated and written whole, gone at the end; yields a job that reads it."""
    job = FioJob((str(path),), size, "read", MIB, 16, direct=direct)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        with Ours(job, "auto") as ours:
            ours.fill()
        os.fsync(descriptor)
        yield job
    finally:
        os.close(descriptor)
        path.unlink()


def against_fio(base: FioJob, engine: str, pairs: int, seconds: float) -> Iterator[Cell]:
    """Read, write and mixed: our ``engine`` and fio's, in pairs."""
    with Ours(base, engine) as ours:
        for rw in RANDOM if is_random(base.rw) else SEQUENTIAL:
            job = replace(base, rw=rw)
            yield Cell(
                "disk",
                "disk",
                engine,
                ours.flags,
                job,
                take_turns(
                    pairs,
                    {
                        "fio": partial(fio.run, job, engine, ours.flags, seconds),
                        "ours": partial(ours.run, job, seconds),
                    },
                ),
                " ".join(fio.command(job, engine, ours.flags, seconds)),
                fio.idle_cpu(job, engine, ours.flags, seconds, max(1, min(pairs // 2, 5))),
            )


def overhead(
    base: FioJob, place: str, engine: str, rws: tuple[ReadWrite, ...], rounds: int, seconds: float
) -> Iterator[Cell]:
    """64 KiB operations on memory: fio's io_uring, our C path, and one ticket of Python's per operation."""
    for depth in (16, 1):
        base = replace(base, bs=SMALL, iodepth=depth)
        with Ours(base, engine) as ours:
            flags = ours.flags if engine == "io_uring" else ("registered_buffers", "registered_files")
            for rw in rws:
                job = replace(base, rw=rw)
                yield Cell(
                    "overhead",
                    place,
                    engine,
                    ours.flags,
                    job,
                    take_turns(
                        rounds,
                        {
                            "fio": partial(fio.run, job, "io_uring", flags, seconds),
                            "lean": partial(fio.run, job, "io_uring", flags, seconds, lean=True),
                            "split": partial(ours.run, job, seconds),
                            "tickets": partial(ours.run, job, seconds, blocks=1),
                        },
                    ),
                    " ".join(fio.command(job, "io_uring", flags, seconds)),
                )


def verifying(base: FioJob, place: str, engine: str, rounds: int, seconds: float) -> Iterator[Cell]:
    """Read, then write, with checksums and without; both sides use memory of their own for each request.

    In that order: what the plain side writes is not what the other one has checksums of.
    """
    with Ours(base, engine, private=True) as plain, Ours(base, engine, private=True, verify=True) as checked:
        checked.fill()  # from here on every page that it reads has a checksum
        for rw in SEQUENTIAL[:2]:
            job = replace(base, rw=rw)
            sides = {
                "plain": partial(plain.run, job, seconds),
                "verify": partial(checked.run, job, seconds),
            }
            yield Cell("verify", place, engine, checked.flags, job, take_turns(rounds, sides))
