"""The run directory: which one is used, and which are refused."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from tiering.telemetry import (
    StatusWriter,
    TelemetryError,
    find_status_files,
    run_directory,
)


def test_the_run_directory_is_chosen_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TIERING_RUN_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    (tmp_path / "xdg").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    assert run_directory() == tmp_path / "xdg" / "tiering"
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "mine"))
    assert run_directory() == tmp_path / "mine"
    assert find_status_files() == []
    assert [path.name for path in tmp_path.iterdir()] == ["xdg"], "a reader creates no directory"
    with closing(StatusWriter("gpt")) as writer:
        assert [file.path for file in find_status_files()] == [writer.path]
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to give a directory to another user")
def test_another_users_directories_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    os.chown(foreign, 12345, 12345)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TIERING_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(foreign))
    assert run_directory() == tmp_path / f"tiering-{os.geteuid()}"
    with pytest.raises(TelemetryError, match="owned by user 12345"):
        StatusWriter("gpt", directory=foreign)
    own = tmp_path / "mine"
    writer = StatusWriter("gpt", directory=own)
    os.chown(writer.path, 12345, 12345)
    assert find_status_files(own) == []
    writer.close()


def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o770, 0o755, 0o701):
        shared.chmod(mode)
        message = rf"{shared} is open to others \(mode {mode:04o}\); name a new directory.*={shared}/tiering-status$"
        with pytest.raises(TelemetryError, match=message):
            StatusWriter("gpt", directory=shared)
        with pytest.raises(TelemetryError, match=message):
            find_status_files(shared)
    link = tmp_path / "link"
    (tmp_path / "target").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "target")
    with pytest.raises(TelemetryError, match="symbolic link"):
        find_status_files(link)
    (tmp_path / "file").touch()
    with pytest.raises(TelemetryError, match="not a directory"):
        find_status_files(tmp_path / "file")
    with pytest.raises(TelemetryError, match="No such file"):
        StatusWriter("gpt", directory=tmp_path / "a" / "b")
    assert find_status_files(tmp_path / "a" / "b") == []


def test_only_a_directory_of_pages_is_to_be_closed(tmp_path: Path) -> None:
    """The remedy must not close a shared directory, such as /etc."""
    shared = tmp_path / "shared"
    shared.mkdir()
    with closing(StatusWriter("gpt", directory=shared / "tiering-status")) as writer:
        directory = writer.path.parent
        directory.chmod(0o755)
        with pytest.raises(TelemetryError, match=rf"; close it: chmod 700 {directory}$"):
            find_status_files(directory)
        (directory / "hosts").touch()
        with pytest.raises(TelemetryError, match=rf"TIERING_RUN_DIR={directory}/tiering-status$"):
            find_status_files(directory)
