"""Where pages live: one directory per user, closed to everybody else; which pages are there, and which are left over.

A page is RUN.RANK.PID-RANDOM.page, and ends in .new until it is whole.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tiering.errors import TelemetryError
from tiering.telemetry.status_file import StatusFile, as_text, locked_by_another, open_status_file

SUFFIX = ".page"
UNFINISHED = ".new"
KEPT_SECONDS = 30.0  # that the page of a run that has ended can still be read
_WRITERS_NAME = re.compile(r".+\.[0-9]+\.[0-9]+-[0-9a-f]+", re.DOTALL)


def run_directory() -> Path:
    """The per-user directory of pages, whether or not it is there.

    It is ``$TIERING_RUN_DIR``, else ``$XDG_RUNTIME_DIR/tiering``, else ``tiering-<uid>`` where temporary files go.
    """
    return _default_directory(os.environ)


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
    """``directory``, created 0700 if missing. Raises TelemetryError when it is not ours alone."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(directory, error) from error
    try:
        _check(directory)
    except OSError as error:
        raise _unusable(directory, error) from error
    return directory


def _check(directory: Path) -> None:
    """That nobody else can plant pages in ``directory``, or see who trains. Raises TelemetryError, or OSError."""
    status = directory.lstat()
    mode = stat.S_IMODE(status.st_mode)
    remedy = "name a directory of your own (TIERING_RUN_DIR sets the default)"
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.geteuid():
        wrong = f"is owned by user {status.st_uid}, not {os.geteuid()}"
    elif mode & 0o077:
        wrong, remedy = f"is open to others (mode {mode:04o})", _closing(directory)
    else:
        return
    raise TelemetryError(f"run directory {directory} {wrong}; {remedy}")


def _closing(directory: Path) -> str:
    """How to have a closed directory. One that holds anything but pages may be everybody's, as /etc or /tmp is."""
    names = [path.name for path in directory.iterdir()]
    if names and all(name.endswith((SUFFIX, UNFINISHED)) for name in names):
        return f"close it: chmod 700 {directory}"
    return f"name a new directory, which is made closed, as TIERING_RUN_DIR={directory / 'tiering-pages'}"


def _unusable(directory: Path, error: OSError) -> TelemetryError:
    return TelemetryError(
        f"run directory {directory} cannot be used: {error.strerror}; set TIERING_RUN_DIR to one that can"
    )


def plain_name(run_name: str) -> str:
    """``run_name`` as file names spell it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", run_name)[:80] or "run"


def find_status_files(directory: Path | None = None) -> list[StatusFile]:
    """Pages in ``directory`` (default: ``run_directory()``) by run and rank, without other users' files.

    There are none in a directory that is not there: a reader makes none. Raises TelemetryError when it is not ours
    alone, or cannot be read.
    """
    directory = run_directory() if directory is None else Path(directory)
    try:
        _check(directory)
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TelemetryError(
            f"run directory {directory} cannot be read: {error.strerror}; it should be its owner's, with mode 0700"
        ) from error
    pages = [_named(path) for path in paths if path.name.endswith(SUFFIX) and _is_ours(path)]
    return sorted(pages, key=lambda page: (page.run_name, page.rank, page.path))


def sweep(directory: Path, keep_seconds: float = 0.0) -> list[Path]:
    """Remove pages whose writer is dead and whose last update is over ``keep_seconds`` old; return them.

    Files with names that no writer gives are let alone: the directory may be one that is used for something else, too.
    """
    swept = []
    unfinished_keep = max(keep_seconds, 60.0)  # between open and lock a new page looks dead
    for pattern, keep in (("*" + SUFFIX, keep_seconds), ("*" + UNFINISHED, unfinished_keep)):
        for path in directory.glob(pattern):
            if _WRITERS_NAME.fullmatch(path.stem) and _is_ours(path) and _is_dead(path, keep):
                with suppress(OSError):  # gone already, or on a file system that became read-only: it stays
                    path.unlink()
                    swept.append(path)
    return swept


def _is_dead(path: Path, keep_seconds: float) -> bool:
    """Whether the page is without a writer, and its last update over ``keep_seconds`` old."""
    try:
        fd = open_status_file(path)
    except OSError:
        return False
    try:
        # Age first: to ask for the lock of a page that is being made would hold up who makes it, and for long if we
        # are stopped just then.
        age = abs(time.time() - os.fstat(fd).st_mtime)  # a clock set back must not keep the dead
        return age > keep_seconds and not locked_by_another(fd)
    finally:
        os.close(fd)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _named(path: Path) -> StatusFile:
    # run_name.rank.pid-random.page; a file of another name is listed too, and says why it cannot be read.
    name = as_text(path.name)
    parts = name.removesuffix(SUFFIX).split(".")
    rank = int(parts[1]) if len(parts) == 3 and re.fullmatch("[0-9]{1,9}", parts[1]) else 0
    return StatusFile(path, parts[0] or name, rank)
