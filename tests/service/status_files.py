"""Status files as they are read, without a file system: of ranks that publish, and of ranks that do not any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from service.view import Reading, View, view_of
from tiering.telemetry import Snapshot, StatusFile, StatusReading

NOW = 1_790_000_000.0


def live(
    rank: int = 0,
    *,
    name: str = "gpt",
    run_id: str = "gpt-1",
    local: int = 1,
    age: float = 0.1,
    at: float = NOW,
    pid: int = 1,
    step: int = 0,
) -> tuple[StatusFile, StatusReading]:
    """The page of a rank that published ``age`` seconds before ``at``."""
    snapshot = Snapshot(name, rank, 8, pid, NOW - pid, step, run_id=run_id, local_world_size=local)
    return page(run_id or name, rank), StatusReading("live", age, snapshot, "", None, at - age)


def page(file_name: str, rank: int) -> StatusFile:
    return StatusFile(Path(f"/run/{file_name}.{rank}.1-ab.page"), file_name, rank)


def lost(reading: tuple[StatusFile, StatusReading], state: str = "stale") -> tuple[StatusFile, StatusReading]:
    """The same page, of which nothing is left but its last words (if it is stale)."""
    file, status = reading
    snapshot = status.snapshot if state == "stale" else None
    return file, replace(status, state=state, snapshot=snapshot, reason=f"it is {state}")


def view(*readings: tuple[StatusFile, StatusReading]) -> View:
    return view_of(Reading(readings), NOW)
