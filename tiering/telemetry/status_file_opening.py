"""Opens the status file of a run: in the run directory, else in a private directory, else nowhere.

Telemetry never stops training. Only a directory that the configuration names raises an error if it cannot be used,
because the user chose it.
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
from tiering.telemetry.run_directories import plain_name, sweep
from tiering.telemetry.status_file_writer import StatusWriter

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
    """The status file of ``rank``: in ``directory`` or, if that is None, in the run directory or in a private one.

    Returns None if no directory can hold it. A fallback and a None are logged at ``level`` with the reason why the run
    directory cannot be used. Ranks of one node share the private directory, whose name ends with ``run_id``. Raises
    TelemetryError if ``directory`` is given and cannot be used.
    """
    if directory is not None:
        return StatusWriter(run_id, rank, world_size, directory, description)
    try:
        return StatusWriter(run_id, rank, world_size, None, description)
    except (TelemetryError, OSError) as error:
        refusal = error.message if isinstance(error, TelemetryError) else str(error)
    for base in _temporary_directories():
        with suppress(TelemetryError, OSError):
            _sweep_private(base)
            private = base / f"{_prefix()}{plain_name(run_id)}"
            writer = StatusWriter(run_id, rank, world_size, private, description, owns_directory=True)
            log.log(
                level,
                "[%s] %s. The status file of this run is in %s instead: tierd --dir %s shows it",
                *(TelemetryError.code, refusal, private, private),
            )
            return writer
    log.log(
        level,
        "[%s] %s. No other directory can hold the status file: this run trains without telemetry, and tierd does not"
        " show it",
        *(TelemetryError.code, refusal),
    )
    return None


def _temporary_directories() -> Iterator[Path]:
    """Directories for temporary files, memory first: a status file is small, and the disk may be full."""
    # The caller creates a directory with mode 0700 in each.
    yield Path("/dev/shm")  # noqa: S108
    # gettempdir() raises if it finds no usable directory.
    with suppress(OSError):
        yield Path(tempfile.gettempdir())
    yield Path("/var/tmp")  # noqa: S108


def _prefix() -> str:
    return f"tiering-{os.geteuid()}-"


def _sweep_private(base: Path) -> None:
    """Remove private directories of killed runs from ``base``."""
    for directory in base.glob(_prefix() + "*"):
        if directory.lstat().st_uid == os.geteuid() and directory.is_dir() and not directory.is_symlink():
            sweep(directory)
            # rmdir fails while the directory holds the status file of a live writer.
            with suppress(OSError):
                directory.rmdir()
