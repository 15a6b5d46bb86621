"""Counters that outlive the process that counted them: one small page per rank, in a per-user run directory.

    snapshot.py     what a page says again and again     description.py   what it says once
    figure.py       how a field of these says what it is, for answers, metrics and documentation
    rates.py        bandwidths of two snapshots
    page.py         the file: its format and its reader    writer.py        its writer
    directory.py    where pages live, who may look, and the sweeper
    opening.py      a page for a run, whatever is wrong with its directory
    publisher.py    the thread that keeps a page fresh while training runs

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
from tiering.telemetry.directory import find_status_files, plain_name, run_directory, sweep
from tiering.telemetry.figure import Figure, Label, figures, marks
from tiering.telemetry.opening import open_writer
from tiering.telemetry.publisher import Publisher
from tiering.telemetry.rates import with_rates
from tiering.telemetry.snapshot import (
    COPIES_OF,
    RECENT_STEPS,
    ActivationStatus,
    CheckpointStatus,
    CollectiveStatus,
    CopyStatus,
    DeviceMemoryStatus,
    DirectionStatus,
    Diverging,
    EndStatus,
    IoEngineStatus,
    LatencyStatus,
    LinkStatus,
    PathStatus,
    Phase,
    Snapshot,
    StepRecord,
    TierStatus,
)
from tiering.telemetry.status_file import StatusFile, StatusReading, as_text
from tiering.telemetry.writer import StatusWriter

__all__ = [
    "COPIES_OF",
    "RECENT_STEPS",
    "ActivationStatus",
    "CheckpointStatus",
    "CollectiveStatus",
    "ConfigurationStatus",
    "CopyStatus",
    "Description",
    "DeviceMemoryStatus",
    "DirectionStatus",
    "Diverging",
    "EndStatus",
    "Figure",
    "IoEngineStatus",
    "Label",
    "LatencyStatus",
    "LinkStatus",
    "PathStatus",
    "Phase",
    "PlanStatus",
    "PlannedTier",
    "Publisher",
    "SettingStatus",
    "Snapshot",
    "StatusFile",
    "StatusReading",
    "StatusWriter",
    "StepRecord",
    "TelemetryError",
    "TierStatus",
    "as_text",
    "figures",
    "find_status_files",
    "marks",
    "open_writer",
    "plain_name",
    "run_directory",
    "sweep",
    "with_rates",
]
