"""Counters that outlive the process that counted them: one small page per rank, in a per-user run directory.

    snapshot.py    what a page says           directory.py   where pages live, and who may look
    page.py        the file: format, writer, reader, sweeper
    publisher.py   the thread that keeps a page fresh while training runs

Imports no torch. Directories are 0700 and pages 0600; what another user owns is refused or ignored.
"""

from tiering.errors import TelemetryError
from tiering.telemetry.directory import run_directory
from tiering.telemetry.page import Page, PageReading, PageWriter, find_pages, sweep
from tiering.telemetry.publisher import Publisher
from tiering.telemetry.snapshot import (
    ActivationStatus,
    CollectiveStatus,
    ConfigurationStatus,
    DirectionStatus,
    IoEngineStatus,
    PathStatus,
    Snapshot,
    StepRecord,
    TierStatus,
    with_rates,
)

__all__ = [
    "ActivationStatus",
    "CollectiveStatus",
    "ConfigurationStatus",
    "DirectionStatus",
    "IoEngineStatus",
    "Page",
    "PageReading",
    "PageWriter",
    "PathStatus",
    "Publisher",
    "Snapshot",
    "StepRecord",
    "TelemetryError",
    "TierStatus",
    "find_pages",
    "run_directory",
    "sweep",
    "with_rates",
]
