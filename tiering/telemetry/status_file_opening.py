"""Opens the status file of a run: in the run directory, else in a private directory, else nowhere.

Telemetry never stops training. Only a directory that the configuration names raises an error if it cannot be used,
because the user chose it.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tiering.errors import TelemetryError
from tiering.telemetry.description import Description
from tiering.telemetry.run_directories import find_status_files, plain_name, run_directory, sweep
from tiering.telemetry.status_file_writer import StatusWriter

# Of one user: each reading opens them all.
MAX_DIRECTORIES = 32

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


def other_run_directories() -> list[Path]:
    """Directories of this user in which a rank publishes now, and which are not ``run_directory()``.

    A job without XDG_RUNTIME_DIR, or with an unusable run directory, publishes in one of them.
    """
    bases, own = _bases(), run_directory().resolve()
    candidates = [
        Path(f"/run/user/{os.geteuid()}/tiering"),
        *(base / f"tiering-{os.geteuid()}" for base in bases),
    ]
    for base in bases:
        candidates += sorted(base.glob(f"{_prefix()}*"))
    return [directory for directory in candidates if directory != own and _has_live_rank(directory)]


def run_directories_of_all_users(runtime: Path = Path("/run/user")) -> Iterator[tuple[Path, int]]:
    """The run directories in the usual places, with the uid of their owner. Only root can read those of all users.

    Directories that are open to others, or that name another user than their owner, are left out.
    """
    candidates = [(runtime / uid / "tiering", uid) for uid in _names(runtime)]
    for base in _bases():
        candidates += [
            (base / name, name.split("-")[1]) for name in _names(base) if name.startswith("tiering-")
        ]
    found = Counter[str]()
    for path, uid in sorted(candidates):
        if found[uid] == MAX_DIRECTORIES:
            continue
        # Removed meanwhile, or a mount that does not answer: no user may hide the runs of the others.
        with suppress(OSError):
            status = path.lstat()
            is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            if is_private and uid == str(status.st_uid):
                found[uid] += 1
                yield path, status.st_uid


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except OSError:
        # Not every system has every one of the usual places.
        return []


def _bases() -> list[Path]:
    """The directories for temporary files, without symbolic links: of some systems, two are the same."""
    return list(dict.fromkeys(base.resolve() for base in _temporary_directories()))


def _has_live_rank(directory: Path) -> bool:
    try:
        return any(file.read().state == "live" for file in find_status_files(directory))
    except TelemetryError:
        return False


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
