"""The wear of the NVMe drives behind swap paths, from their SMART logs, as far as this user may read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tiering.host.drives import behind
from tiering.host.smart import Smart, read_smart
from tiering.telemetry import DriveStatus
from zero3.observe.free_memory import RateLimited

# Seconds between two readings: the bytes written change slowly, and the percentage in months.
INTERVAL = 600.0


class DriveWear:
    """Reads the logs of the drives of a path every INTERVAL. Any thread may call."""

    def __init__(self) -> None:
        self._readings: dict[str, RateLimited[DriveStatus | None]] = {}

    def of(self, path: str) -> DriveStatus | None:
        """The wear of the drives of ``path``; None without NVMe drives, and if the log of one cannot be read."""
        if path not in self._readings:
            self._readings[path] = RateLimited(partial(_read, Path(path)), INTERVAL)
        return self._readings[path]()


def _read(directory: Path) -> DriveStatus | None:
    try:
        logs = [read_smart(disk.name) for disk in behind(directory).disks if disk.name.startswith("nvme")]
    except OSError:
        # Usually EACCES: only root may read a log. tiering doctor explains it.
        return None
    return _status(logs) if logs else None


def _status(logs: Sequence[Smart]) -> DriveStatus:
    endurances = [log.endurance for log in logs]
    known = [endurance for endurance in endurances if endurance is not None]
    return DriveStatus(
        used=max(log.used for log in logs),
        written=sum(log.written for log in logs),
        endurance=sum(known) if len(known) == len(logs) else None,
    )
