"""The wear of the drives behind a swap path: of all of them, rarely read, and unknown to a user who may not read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiering.host.drives import Backing, Drive, FileSystem
from tiering.host.smart import Smart
from tiering.telemetry import DriveStatus
from zero3.observe import drive_wear, free_memory
from zero3.observe.drive_wear import DriveWear

LOG = Smart(0.5, 1.0, 0.1, 3 * 10**14, 0, 0)
LOGS = {"nvme0n1": LOG, "nvme1n1": replace(LOG, used=0.25, written=10**14)}


def test_a_path_has_the_wear_of_its_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    now, names, refused = 1000.0, ["nvme0n1", "nvme1n1", "sda"], False
    read: list[str] = []

    def read_smart(name: str) -> Smart:
        read.append(name)
        if refused:
            raise PermissionError
        return LOGS[name]

    def behind(directory: Path) -> Backing:
        assert directory == Path("/nvme")
        return Backing(FileSystem("ext4", "disk", "/dev/md0", "/nvme", ()), tuple(map(Drive, names)))

    monkeypatch.setattr(drive_wear, "read_smart", read_smart)
    monkeypatch.setattr(drive_wear, "behind", behind)
    monkeypatch.setattr(free_memory.time, "monotonic", lambda: now)
    wear = DriveWear()
    assert wear.of("/nvme") == DriveStatus(0.5, 4 * 10**14, pytest.approx(10**15))
    assert read == names[:2]
    now += drive_wear.INTERVAL - 1
    assert wear.of("/nvme") is not None
    assert len(read) == 2
    now, LOGS["nvme1n1"] = now + 1, replace(LOG, used=0.01)
    assert wear.of("/nvme") == DriveStatus(0.5, 6 * 10**14, None), "the estimate of one is too coarse"
    refused = True
    assert DriveWear().of("/nvme") is None
    names[:] = ["sda"]
    assert DriveWear().of("/nvme") is None
