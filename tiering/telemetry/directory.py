"""Where pages live: one directory per user, closed to everybody else."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tiering.errors import TelemetryError


def run_directory() -> Path:
    """The per-user directory of pages, created if missing.

    It is ``$TIERING_RUN_DIR``, else ``$XDG_RUNTIME_DIR/tiering``, else ``tiering-<uid>`` where temporary
    files go. Raises TelemetryError when it is not ours alone.
    """
    return private_directory(_default_directory(os.environ))


def _default_directory(environ: Mapping[str, str]) -> Path:
    if chosen := environ.get("TIERING_RUN_DIR"):
        return Path(chosen)
    runtime = environ.get("XDG_RUNTIME_DIR")
    # After su or sudo the variable still names the other user's directory, which goes when they log out.
    if runtime and _owned_by_us(Path(runtime)):
        return Path(runtime) / "tiering"
    return Path(tempfile.gettempdir()) / f"tiering-{os.geteuid()}"


def _owned_by_us(directory: Path) -> bool:
    try:
        return directory.stat().st_uid == os.geteuid()
    except OSError:
        return False


def private_directory(directory: Path) -> Path:
    """``directory``, created 0700 if missing. Raises TelemetryError when others could plant pages in it."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        status = directory.lstat()
    except OSError as error:
        raise _unusable(directory, error) from error
    wrong = None
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.geteuid():
        wrong = f"is owned by user {status.st_uid}, not {os.geteuid()}"
    elif status.st_mode & 0o022:
        wrong = f"is writable by others (mode {stat.S_IMODE(status.st_mode):04o})"
    if wrong:
        raise TelemetryError(
            f"run directory {directory} {wrong}; "
            "name a directory of your own (TIERING_RUN_DIR sets the default) with mode 0700"
        )
    return directory


def _unusable(directory: Path, error: OSError) -> TelemetryError:
    return TelemetryError(
        f"run directory {directory} cannot be used: {error.strerror}; set TIERING_RUN_DIR to one that can"
    )
