"""The run directory: one per user, closed to all others; finds its status files, and removes those of dead writers.

A status file is named RUN.RANK.PID-RANDOM.page; during its creation the suffix is .new.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from tiering.errors import TelemetryError
from tiering.telemetry.stacks import ANSWER
from tiering.telemetry.status_file import StatusFile, as_text, locked_by_another, open_status_file

SUFFIX = ".page"
UNFINISHED = ".new"
# Seconds for which the status file of a run that has ended stays readable: four scrapes of Prometheus, at 15 s.
RETENTION_SECONDS = 60.0
_FILE_STEM = re.compile(r".+\.[0-9]+\.[0-9]+-[0-9a-f]+", re.DOTALL)


def run_directory() -> Path:
    """The per-user directory of status files. It may not exist.

    It is ``$TIERING_RUN_DIR``, else ``$XDG_RUNTIME_DIR/tiering``, else ``tiering-<uid>`` in the directory for temporary
    files.
    """
    return _default_directory(os.environ)


def _default_directory(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("TIERING_RUN_DIR"):
        return Path(chosen)
    runtime = environ.get("XDG_RUNTIME_DIR")
    # After su or sudo the variable still names the directory of the first user, which is removed at their logout.
    if runtime and _is_own_directory(Path(runtime)):
        return Path(runtime) / "tiering"
    return Path(tempfile.gettempdir()) / f"tiering-{os.geteuid()}"


def _is_own_directory(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == os.geteuid()
    except OSError:
        return False


def private_directory(directory: Path) -> Path:
    """``directory``, created with mode 0700 if missing. Raises TelemetryError if other users own it or can use it."""
    try:
        # A directory that exists is checked like a new one.
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        _check(directory, os.geteuid())
    except OSError as error:
        raise _unusable(directory, error) from error
    return directory


def _check(directory: Path, owner: int) -> None:
    """Check that only ``owner`` can add status files to ``directory`` and list them.

    Raises TelemetryError or OSError.
    """
    status = directory.lstat()
    mode = stat.S_IMODE(status.st_mode)
    remedy = "name a directory of your own (TIERING_RUN_DIR sets the default)"
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        problem = "is not a directory"
    elif status.st_uid != owner:
        problem = f"is owned by user {status.st_uid}, not {owner}"
    elif mode & 0o077:
        problem, remedy = f"is open to others (mode {mode:04o})", _closing_remedy(directory)
    else:
        return
    raise TelemetryError(f"run directory {directory} {problem}; {remedy}")


def _closing_remedy(directory: Path) -> str:
    """The remedy for an open directory. One that holds other files may be shared, as /etc or /tmp: do not close it."""
    names = [path.name for path in directory.iterdir()]
    if names and all(name.endswith((SUFFIX, UNFINISHED)) for name in names):
        return f"close it: chmod 700 {directory}"
    return f"name a new directory, which is created with mode 0700: TIERING_RUN_DIR={directory / 'tiering-status'}"


def _unusable(directory: Path, error: OSError) -> TelemetryError:
    return TelemetryError(
        f"run directory {directory} cannot be used: {error.strerror}; set TIERING_RUN_DIR to another directory"
    )


def plain_name(run_name: str) -> str:
    """``run_name`` as file names spell it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", run_name)[:80] or "run"


def find_status_files(
    directory: Path | None = None, owner: int | None = None, limit: int | None = None
) -> list[StatusFile]:
    """Status files in ``directory`` (default: ``run_directory()``), sorted by run and rank, without other users' files.

    ``owner`` is the uid of the user (default: this one), and ``limit`` the largest number of files. Empty if the
    directory does not exist; a reader does not create it. Raises TelemetryError if other users own it or can use it, or
    if it cannot be read.
    """
    directory = run_directory() if directory is None else Path(directory)
    owner = os.geteuid() if owner is None else owner
    try:
        _check(directory, owner)
        with os.scandir(directory) as entries:
            # The names of a directory with a million files would fill the memory.
            named = (Path(entry.path) for entry in entries if entry.name.endswith(SUFFIX))
            paths = list(islice(named, limit))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TelemetryError(
            f"run directory {directory} cannot be read: {error.strerror}; its mode must be 0700, and you must own it"
        ) from error
    files = [_status_file(path, owner) for path in paths if _is_file_of(path, owner)]
    return sorted(files, key=lambda file: (file.run_name, file.rank, file.path))


def sweep(directory: Path, keep_seconds: float = 0.0) -> list[Path]:
    """Remove status files whose writer is dead and whose last update is over ``keep_seconds`` old; return their paths.

    Files with other names are kept: the directory may also serve another purpose.
    """
    removed_paths = []
    # Between open and flock a new file has no lock.
    unfinished_keep = max(keep_seconds, 60.0)
    for pattern, keep in (
        ("*" + SUFFIX, keep_seconds),
        ("*" + UNFINISHED, unfinished_keep),
        (f"*{ANSWER}*", unfinished_keep),
    ):
        for path in directory.glob(pattern):
            if _FILE_STEM.fullmatch(path.stem) and _is_file_of(path, os.geteuid()) and is_expired(path, keep):
                # Another process may have removed it, or the file system may be read-only.
                with suppress(OSError):
                    path.unlink()
                    removed_paths.append(path)
    return removed_paths


def is_expired(path: Path, keep_seconds: float) -> bool:
    """Whether the status file has no writer, and its last update is over ``keep_seconds`` old."""
    try:
        fd = open_status_file(path)
    except OSError:
        return False
    try:
        # Compare the age first: the lock of a new file must not be acquired here, because its writer would wait, and
        # wait long if this process is stopped just then.
        # The absolute value: after the clock is set back, old files have a time in the future.
        age = abs(time.time() - os.fstat(fd).st_mtime)
        return age > keep_seconds and not locked_by_another(fd)
    finally:
        os.close(fd)


def _is_file_of(path: Path, owner: int) -> bool:
    try:
        return path.lstat().st_uid == owner
    except OSError:
        return False


def _status_file(path: Path, owner: int) -> StatusFile:
    # A file with another name than run_name.rank.pid-random.page is listed too; its reading says why it is unreadable.
    name = as_text(path.name)
    parts = name.removesuffix(SUFFIX).split(".")
    rank = int(parts[1]) if len(parts) == 3 and re.fullmatch("[0-9]{1,9}", parts[1]) else 0
    return StatusFile(path, parts[0] or name, rank, owner)
