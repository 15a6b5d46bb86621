"""A page for a run that is about to train: where its directory cannot be used, one of its own, or none at all.

Telemetry watches training and never stops it. Only a directory that the configuration names is an error when it cannot
hold pages: somebody who wrote it there wants to hear that.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tiering.errors import TelemetryError
from tiering.telemetry.description import Description
from tiering.telemetry.directory import plain_name, sweep
from tiering.telemetry.writer import StatusWriter

log = logging.getLogger(__name__)


def open_writer(
    run_id: str,
    rank: int = 0,
    world_size: int = 1,
    directory: Path | None = None,
    description: Description | None = None,
    *,
    level: int = logging.WARNING,
) -> StatusWriter | None:
    """The page of ``rank``: in ``directory`` or, without one, in the user's run directory or in a private one.

    None where no directory can hold it. Both are logged at ``level``, with the directory that was meant and why it
    cannot be used. Ranks of one node share the private directory, whose name ends with ``run_id``. Raises
    TelemetryError for a ``directory`` that was given.
    """
    if directory is not None:
        return StatusWriter(run_id, rank, world_size, directory, description)
    try:
        return StatusWriter(run_id, rank, world_size, None, description)
    except (TelemetryError, OSError) as error:
        refusal = error.words if isinstance(error, TelemetryError) else str(error)
    for base in _places():
        with suppress(TelemetryError, OSError):
            _sweep_private(base)
            private = base / f"{_prefix()}{plain_name(run_id)}"
            writer = StatusWriter(run_id, rank, world_size, private, description, owns_directory=True)
            log.log(
                level,
                "[%s] %s. Telemetry of this run is in %s instead: tierd --dir %s shows it",
                *(TelemetryError.code, refusal, private, private),
            )
            return writer
    log.log(
        level,
        "[%s] %s. No other directory could hold the page either: this run trains without telemetry, and tierd does not"
        " see it",
        *(TelemetryError.code, refusal),
    )
    return None


def _places() -> Iterator[Path]:
    """Where temporary files may go, memory first: a page is small, and a full disk may be what is wrong."""
    yield Path("/dev/shm")  # noqa: S108  # a directory of its own in it, closed to others
    with suppress(OSError):  # there is no usable one
        yield Path(tempfile.gettempdir())
    yield Path("/var/tmp")  # noqa: S108


def _prefix() -> str:
    return f"tiering-{os.geteuid()}-"


def _sweep_private(base: Path) -> None:
    """Remove private directories of runs that were killed."""
    for directory in base.glob(_prefix() + "*"):
        if directory.lstat().st_uid == os.geteuid() and directory.is_dir() and not directory.is_symlink():
            sweep(directory)
            with suppress(OSError):  # it has a page whose writer lives
                directory.rmdir()
