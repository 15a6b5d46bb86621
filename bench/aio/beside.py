"""fio beside the sides of another benchmark: what this disk gives in the same rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from frame.rounds import Run

from tiering.tierbench.comparison import fio
from tiering.tierbench.comparison.fio import FioJob

from .cells import warm_file


@contextmanager
def file_for_fio(run: Run[Any, Any], nbytes: int) -> Iterator[FioJob | None]:
    """A job that reads a file of ``nbytes``: direct, sequential, blocks of 1 MiB, 16 in flight.

    None without fio, and the report says so.
    """
    try:
        run.report.facts["fio"] = fio.version()
    except fio.FioError as missing:
        run.report.skipped.append(missing.message)
        yield None
        return
    run.say("writing the file for fio")
    with (
        TemporaryDirectory(dir=run.place.directory, prefix="fio.") as directory,
        warm_file(Path(directory) / "file", nbytes, direct=True) as job,
    ):
        yield job
