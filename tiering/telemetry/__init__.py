"""Counters that outlive the process that counted them: one small page per rank, in a per-user run directory.

    snapshot.py     what a page says again and again     description.py   what it says once
    page.py         the file: format, writer, reader, sweeper
    publisher.py    the thread that keeps a page fresh while training runs
    directory.py    where pages live, and who may look

Imports no torch. Directories are 0700 and pages 0600; what another user owns is refused or ignored.
"""

from tiering.errors import TelemetryError
from tiering.telemetry.description import (
    ConfigurationStatus,
    Description,
    PlannedTier,
    PlanStatus,
    SettingStatus,
)
from tiering.telemetry.directory import run_directory
from tiering.telemetry.page import Page, PageReading, PageWriter, find_pages, sweep
from tiering.telemetry.publisher import Publisher
from tiering.telemetry.snapshot import (
    ActivationStatus,
    CheckpointStatus,
    CollectiveStatus,
    DirectionStatus,
    IoEngineStatus,
    LatencyStatus,
    PathStatus,
    Snapshot,
    StepRecord,
    TierStatus,
    with_rates,
)

__all__ = [
    "ActivationStatus",
    "CheckpointStatus",
    "CollectiveStatus",
    "ConfigurationStatus",
    "Description",
    "DirectionStatus",
    "IoEngineStatus",
    "LatencyStatus",
    "Page",
    "PageReading",
    "PageWriter",
    "PathStatus",
    "PlanStatus",
    "PlannedTier",
    "Publisher",
    "SettingStatus",
    "Snapshot",
    "StepRecord",
    "TelemetryError",
    "TierStatus",
    "find_pages",
    "run_directory",
    "sweep",
    "with_rates",
]
