"""Checks of the directory in which runs publish their status for the sidecar."""

from __future__ import annotations

import os
from pathlib import Path

from tiering._text import counted
from tiering.doctor.finding import Check, Finding, note
from tiering.errors import TelemetryError
from tiering.telemetry import find_status_files, other_run_directories, run_directory


def published(_: Path) -> Finding:
    """The run directory of this user's environment, and other directories in which their runs publish."""
    directory = run_directory()
    try:
        readings = [file.read() for file in find_status_files(directory)]
    except TelemetryError as error:
        return _unusable(error.message)
    place = directory if directory.exists() else directory.parent
    if not os.access(place, os.W_OK | os.X_OK):
        return _unusable(f"{directory} cannot be written: {place} is missing or closed to this user")
    live = len(
        {reading.snapshot.run_id for reading in readings if reading.state == "live" and reading.snapshot}
    )
    found = f"{directory}, {counted(live, 'run')} there"
    if others := other_run_directories():
        names = ", ".join(map(str, others))
        return note(
            f"{found}; runs also publish in {names}, where tierd does not look",
            f"tierd --dir {others[0]}; for later runs, set the same TIERING_RUN_DIR for jobs and for tierd",
        )
    return Finding(found)


def _unusable(reason: str) -> Finding:
    return note(
        f"{reason}. Runs publish in a private directory instead, and say which",
        "set TIERING_RUN_DIR, for jobs and for tierd, to a directory of your own with mode 0700",
    )


CHECKS: dict[str, Check] = {"run directory": published}
