"""The measurements: cells of readings, every side in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from figures.turns import take_turns

from . import fio
from .load import Kind, Load, Reading
from .ours import Ours

MIB = 1 << 20
SMALL = 64 << 10

KINDS: tuple[Kind, ...] = ("read", "write", "mixed")


@dataclass(slots=True)
class Cell:
    """``sides[name][i]`` is what side ``name`` did in round i of ``load``.

    ``place`` is where the file lies; ``fio_idle_cpu`` the CPU seconds of a fio that starts, waits and ends.
    """

    experiment: Literal["disk", "overhead", "verify"]
    place: str
    engine: str
    flags: tuple[str, ...]
    load: Load
    sides: dict[str, list[Reading]] = field(default_factory=dict)
    fio_command: str = ""
    fio_idle_cpu: float = 0.0


@contextmanager
def warm_file(path: Path, size: int, *, direct: bool) -> Iterator[Load]:
    """A file of ``size`` bytes, preallocated and written whole, gone at the end; yields a load that reads it."""
    load = Load(str(path), size, direct, MIB, 16, "read")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        with Ours(load, "auto") as ours:
            ours.fill()
        os.fsync(descriptor)
        yield load
    finally:
        os.close(descriptor)
        path.unlink()


def against_fio(base: Load, engine: str, pairs: int, seconds: float) -> Iterator[Cell]:
    """Read, write and mixed: our ``engine`` and fio's, in pairs."""
    with Ours(base, engine) as ours:
        for kind in KINDS:
            load = replace(base, kind=kind)
            yield Cell(
                "disk",
                "disk",
                engine,
                ours.flags,
                load,
                take_turns(
                    pairs,
                    {
                        "fio": partial(fio.run, load, engine, ours.flags, seconds),
                        "ours": partial(ours.run, load, seconds),
                    },
                ),
                " ".join(fio.command(load, engine, ours.flags, seconds)),
                fio.idle_cpu(load, engine, ours.flags, seconds, max(1, min(pairs // 2, 5))),
            )


def overhead(
    base: Load, place: str, engine: str, kinds: tuple[Kind, ...], rounds: int, seconds: float
) -> Iterator[Cell]:
    """64 KiB operations on memory: fio's io_uring, our C path, and one ticket of Python's per operation."""
    for depth in (16, 1):
        base = replace(base, block=SMALL, depth=depth)
        with Ours(base, engine) as ours:
            flags = ours.flags if engine == "io_uring" else ("registered_buffers", "registered_files")
            for kind in kinds:
                load = replace(base, kind=kind)
                yield Cell(
                    "overhead",
                    place,
                    engine,
                    ours.flags,
                    load,
                    take_turns(
                        rounds,
                        {
                            "fio": partial(fio.run, load, "io_uring", flags, seconds),
                            "lean": partial(fio.run, load, "io_uring", flags, seconds, lean=True),
                            "split": partial(ours.run, load, seconds),
                            "tickets": partial(ours.run, load, seconds, blocks=1),
                        },
                    ),
                    " ".join(fio.command(load, "io_uring", flags, seconds)),
                )


def verifying(base: Load, place: str, engine: str, rounds: int, seconds: float) -> Iterator[Cell]:
    """Read, then write, with checksums and without; both sides use memory of their own for each request.

    In that order: what the plain side writes is not what the other one has checksums of.
    """
    with Ours(base, engine, private=True) as plain, Ours(base, engine, private=True, verify=True) as checked:
        checked.fill()  # from here on every page that it reads has a checksum
        for kind in KINDS[:2]:
            load = replace(base, kind=kind)
            sides = {
                "plain": partial(plain.run, load, seconds),
                "verify": partial(checked.run, load, seconds),
            }
            yield Cell("verify", place, engine, checked.flags, load, take_turns(rounds, sides))
