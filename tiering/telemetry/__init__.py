"""Internal: telemetry. Each rank publishes its counters in a small status file, which survives a crash of the rank.

    snapshot.py             the content that each publication replaces
    transfer_status.py      its part on transfers: NVMe, the device's link, other ranks
    description.py          the content that never changes
    figure.py               declares a field's help text and metric name
    bandwidths.py           bandwidths from two snapshots
    status_file.py          the file: its format and its reader
    status_file_writer.py   its writer
    run_directories.py      run directories: their place, their permissions, the removal of old status files
    status_file_opening.py  opens a status file for a run, elsewhere if the run directory cannot be used
    publisher.py            the thread that updates a status file while training runs

Imports no torch. Directories have mode 0700 and status files 0600; files of other users are refused or ignored.
"""

from tiering.errors import TelemetryError
from tiering.telemetry.bandwidths import with_rates
from tiering.telemetry.description import (
    ConfigurationStatus,
    Description,
    PlannedTier,
    PlanStatus,
    SettingStatus,
)
from tiering.telemetry.figure import Diverging, Figure, Label, figures, marks
from tiering.telemetry.publisher import Publisher
from tiering.telemetry.run_directories import find_status_files, plain_name, run_directory, sweep
from tiering.telemetry.snapshot import (
    COPIES_OF,
    RECENT_STEPS,
    ActivationStatus,
    CheckpointStatus,
    DeviceMemoryStatus,
    EndStatus,
    Phase,
    Snapshot,
    StepRecord,
    TierStatus,
)
from tiering.telemetry.status_file import StatusFile, StatusReading, as_text
from tiering.telemetry.status_file_opening import open_writer
from tiering.telemetry.status_file_writer import StatusWriter
from tiering.telemetry.transfer_status import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    IoEngineStatus,
    LatencyStatus,
    LinkStatus,
    PathStatus,
)

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
