"""The runs that ended last. Each has a file in the run directory, so that a restart of the sidecar keeps them."""

from __future__ import annotations

import logging
import os
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import get_args

from service.formatting import plain
from service.responses.status import EndedRun, ended_run
from service.run_end import How
from service.view import RunView
from tiering.telemetry import TelemetryError, open_status_file, plain_name, private_directory

MAX_ENDED = 30  # runs to keep
SUFFIX = ".ended"
LARGEST_FILE = 64 << 10  # bytes; a summary takes about 2 KiB

log = logging.getLogger(__name__)


class EndedRuns:
    """At most MAX_ENDED runs. Without a ``directory``, or if it cannot be written, they are kept in memory only.

    ``counts`` are the runs that were added since the start of the sidecar, by how they ended.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.counts: dict[How, int] = dict.fromkeys(get_args(How), 0)
        self._directory = directory
        # By id, in the order of their ends.
        self._runs: dict[str, EndedRun] = {}
        for run in sorted(self._load(), key=lambda run: run.ended_at or 0.0):
            self._runs[run.id] = run

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def without(self, present: Container[str]) -> list[EndedRun]:
        """The runs whose ids are not in ``present``, the latest first."""
        return [run for run in reversed(self._runs.values()) if run.id not in present]

    def add(self, run: RunView) -> None:
        """Keep the summary of ``run``, whose ranks have the last status. A run is added once."""
        if run.id in self._runs:
            return
        summary = self._runs[run.id] = ended_run(run)
        self.counts[summary.how] += 1
        self._save(summary)
        while len(self._runs) > MAX_ENDED:
            self.remove(next(iter(self._runs)))

    def remove(self, run_id: str) -> None:
        """Forget a run, for example because its ranks publish again."""
        if self._runs.pop(run_id, None) is not None and (path := self._path(run_id)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, run_id: str) -> Path | None:
        return None if self._directory is None else self._directory / (plain_name(run_id) + SUFFIX)

    def _save(self, run: EndedRun) -> None:
        if (path := self._path(run.id)) is None:
            return
        try:
            # Only root's directory may be missing, when all runs are those of other users.
            private_directory(path.parent)
            # Another tierd of this directory may have written it.
            with suppress(FileExistsError):
                _write(path, run.model_dump_json())
        except (OSError, TelemetryError) as error:
            log.warning("%s", plain(f"the end of run {run.id} is kept in memory only: {error}"))

    def _load(self) -> list[EndedRun]:
        """The runs in the newest files. Older files are removed, also those that cannot be read."""
        if self._directory is None:
            return []
        paths = sorted(self._directory.glob("*" + SUFFIX), key=_changed_at, reverse=True)
        for path in paths[MAX_ENDED:]:
            # The file system may be read-only.
            with suppress(OSError):
                path.unlink(missing_ok=True)
        runs = []
        for path in paths[:MAX_ENDED]:
            # Of another version, damaged, or just removed by another tierd.
            with suppress(OSError, ValueError):
                runs.append(_read(path))
        return runs


def _changed_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        # Another tierd has just removed it.
        return 0.0


def _read(path: Path) -> EndedRun:
    with os.fdopen(open_status_file(path), "rb") as file:
        return EndedRun.model_validate_json(file.read(LARGEST_FILE))


def _write(path: Path, text: str) -> None:
    """Create the file with all of ``text``. Raises OSError, and leaves no part of a file on a full disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise
