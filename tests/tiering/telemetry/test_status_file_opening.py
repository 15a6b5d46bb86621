"""Telemetry never stops training: the fallback to a private directory, or to no status file."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.tiering.telemetry.status_files import child, first_line, snapshot
from tiering.telemetry import (
    StatusWriter,
    TelemetryError,
    find_status_files,
    open_writer,
    run_directories_of_all_users,
    status_file_opening,
)


@pytest.fixture
def temporary_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories for temporary files; the first does not exist."""
    directories = [tmp_path / "missing", tmp_path / "spare"]
    directories[1].mkdir()
    monkeypatch.setattr(status_file_opening, "_temporary_directories", lambda: iter(directories))
    return directories


def _missing_parent(tmp_path: Path) -> Path:
    return tmp_path / "no" / "parent"


def _of_another_user(tmp_path: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("root is needed to give a directory to another user")
    (foreign := tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    return foreign


def _open_to_others(tmp_path: Path) -> Path:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o755)
    return shared


def _no_directory(tmp_path: Path) -> Path:
    (file := tmp_path / "file").touch()
    return file


CAUSES = {
    "No such file or directory": _missing_parent,
    "is owned by user 12345, not": _of_another_user,
    r"is open to others \(mode 0755\)": _open_to_others,
    "is not a directory": _no_directory,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_directory_that_cannot_be_used_is_replaced(
    cause: str,
    temporary_directories: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = CAUSES[cause](tmp_path)
    monkeypatch.setenv("TIERING_RUN_DIR", str(directory))
    private = temporary_directories[1] / f"tiering-{os.geteuid()}-gpt-0a1b2c3d"
    writers = [open_writer("gpt-0a1b2c3d", rank, 2) for rank in range(2)]
    try:
        paths = [writer.path for writer in writers if writer is not None]
        assert [file.path for file in find_status_files(private)] == paths and len(paths) == 2
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        record = caplog.records[0]
        assert record.levelno == logging.WARNING and re.search(cause, record.getMessage())
        assert record.getMessage().startswith(f"[TIER-TELEMETRY] run directory {directory} ")
        assert f"tierd --dir {private} shows it" in record.getMessage()
    finally:
        for writer in writers:
            assert writer is not None
            writer.close()
    assert list(temporary_directories[1].iterdir()) == [], (
        "closing the last file removes the private directory"
    )
    with pytest.raises(TelemetryError, match=cause):
        open_writer("gpt", directory=directory)


def test_a_full_disk_is_no_error(
    small_disk: Callable[[int], Path],
    temporary_directories: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = small_disk(2 << 20)
    monkeypatch.setenv("TIERING_RUN_DIR", str(disk / "run"))
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    writer = open_writer("gpt-0a1b2c3d")
    assert writer is not None and writer.path.parent.parent == temporary_directories[1]
    writer.close()
    assert "No space left on device" in caplog.text


def test_without_any_directory_there_is_no_status_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_file_opening, "_temporary_directories", lambda: iter([tmp_path / "missing"]))
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "no" / "parent"))
    assert open_writer("gpt") is None
    (record,) = caplog.records
    assert "this run trains without telemetry" in record.getMessage()


def test_the_directories_of_all_users_are_those_that_their_owner_alone_can_use(
    tmp_path: Path, temporary_directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, spare = os.geteuid(), temporary_directories[1]
    runtime = tmp_path / "user"
    good = [
        runtime / str(uid) / "tiering",
        *(spare / f"tiering-{uid}{run}" for run in ("", "-gpt-1", "-gpt-2")),
    ]
    for directory in (*good, spare / f"tiering-{uid + 1}", spare / "tiering-x"):
        directory.mkdir(mode=0o700, parents=True)
    (spare / f"tiering-{uid}-open").mkdir()
    (spare / f"tiering-{uid}-open").chmod(0o755)
    (spare / f"tiering-{uid}-link").symlink_to(good[0])
    (spare / f"tiering-{uid}-file").touch()
    found = list(run_directories_of_all_users(runtime))
    assert sorted(found) == sorted((directory, uid) for directory in good)
    monkeypatch.setattr(status_file_opening, "MAX_DIRECTORIES", 2)
    assert len(list(run_directories_of_all_users(runtime))) == 2


def test_private_directories_of_killed_runs_are_removed(
    temporary_directories: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "no" / "parent"))
    killed, live = (
        temporary_directories[1] / f"tiering-{os.geteuid()}-{name}" for name in ("killed", "lives")
    )
    for directory in (killed, live):
        directory.mkdir(mode=0o700)
    script = 'writer = StatusWriter("gpt", directory=directory); say("ready"); time.sleep(600)'
    with child(script, killed) as process:
        assert first_line(process) == "ready"
    assert len(find_status_files(killed)) == 1
    with closing(StatusWriter("lives", directory=live)) as live_writer:
        live_writer.publish(snapshot())
        writer = open_writer("gpt")
        assert writer is not None
        assert not killed.exists() and live_writer.path.exists()
        writer.close()
