"""Internal: telemetry. Each rank publishes its counters in a small status file, which survives a crash of the rank.

    snapshot.py             the content that each publication replaces
    transfer_status.py      its part on transfers: NVMe, the device's link, other ranks
    step_record.py          one step; training_curve.py: all steps, in a bounded number of points
    description.py          the content that never changes
    figure.py               declares a field's help text and metric name
    job_labels.py           labels of a run: its job, its pod, those of the configuration
    bandwidths.py           bandwidths from two snapshots
    status_file.py          the file: its format and its reader
    status_file_writer.py   its writer
    run_directories.py      run directories: their place, their permissions, the removal of old status files
    status_file_opening.py  opens a status file for a run, elsewhere if the run directory cannot be used
    stacks.py               Python stacks of a rank, for a reader that requests them
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
from tiering.telemetry.job_labels import LABEL_NAME, LONGEST_VALUE, RESERVED_LABELS, job_labels
from tiering.telemetry.publisher import Publisher
from tiering.telemetry.run_directories import (
    RETENTION_SECONDS,
    find_status_files,
    is_expired,
    plain_name,
    private_directory,
    run_directory,
    sweep,
)
from tiering.telemetry.snapshot import (
    COPIES_OF,
    ActivationStatus,
    CheckpointStatus,
    DeviceMemoryStatus,
    EndStatus,
    GpuStatus,
    Phase,
    Snapshot,
    TierStatus,
)
from tiering.telemetry.stacks import request_stacks, withdraw_request, write_stacks_at_signal
from tiering.telemetry.status_file import StatusFile, StatusReading, as_text, open_status_file
from tiering.telemetry.status_file_opening import (
    open_writer,
    other_run_directories,
    run_directories_of_all_users,
)
from tiering.telemetry.status_file_writer import StatusWriter
from tiering.telemetry.step_record import RECENT_STEPS, StepRecord
from tiering.telemetry.training_curve import CurveRecorder, TrainingCurve
from tiering.telemetry.transfer_status import (
    CollectiveStatus,
    CopyStatus,
    DirectionStatus,
    DriveStatus,
    IoEngineStatus,
    LatencyStatus,
    LinkStatus,
    PathStatus,
)

__all__ = [
    "COPIES_OF",
    "LABEL_NAME",
    "LONGEST_VALUE",
    "RECENT_STEPS",
    "RESERVED_LABELS",
    "RETENTION_SECONDS",
    "ActivationStatus",
    "CheckpointStatus",
    "CollectiveStatus",
    "ConfigurationStatus",
    "CopyStatus",
    "CurveRecorder",
    "Description",
    "DeviceMemoryStatus",
    "DirectionStatus",
    "Diverging",
    "DriveStatus",
    "EndStatus",
    "Figure",
    "GpuStatus",
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
    "TrainingCurve",
    "as_text",
    "figures",
    "find_status_files",
    "is_expired",
    "job_labels",
    "marks",
    "open_status_file",
    "open_writer",
    "other_run_directories",
    "plain_name",
    "private_directory",
    "request_stacks",
    "run_directories_of_all_users",
    "run_directory",
    "sweep",
    "with_rates",
    "withdraw_request",
    "write_stacks_at_signal",
]
