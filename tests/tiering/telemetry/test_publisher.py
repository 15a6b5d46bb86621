"""The thread that updates a status file, and never disturbs training."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.tiering.telemetry.status_files import child, describing, only_reading, snapshot, until
from tiering.telemetry import (
    DirectionStatus,
    PathStatus,
    Publisher,
    Snapshot,
    StatusWriter,
    find_status_files,
)


def test_the_publisher_updates_the_file_and_fills_in_rates(tmp_path: Path) -> None:
    moved = iter(range(0, 1 << 40, 1000))

    def source() -> Snapshot:
        return snapshot(io=[PathStatus("/nvme", "threads", True, DirectionStatus(bytes=next(moved)))])

    def rate() -> float:
        published = only_reading(tmp_path).snapshot
        return published.io[0].read.bytes_per_second if published is not None else 0.0

    before = set(threading.enumerate())
    publisher = Publisher(StatusWriter("gpt", directory=tmp_path), source, interval=0.02)
    publisher.start()
    assert "tiering-telemetry" in [thread.name for thread in set(threading.enumerate()) - before]
    assert only_reading(tmp_path).snapshot is not None
    until(lambda: rate() > 0)
    publisher.close()
    publisher.close()
    assert find_status_files(tmp_path) == []
    assert "tiering-telemetry" not in [thread.name for thread in set(threading.enumerate()) - before]
    with pytest.raises(ValueError, match="already been started"):
        publisher.start()


def test_publish_now_does_not_wait_for_the_interval(tmp_path: Path) -> None:
    steps = iter(range(100))
    publisher = Publisher(
        StatusWriter("gpt", directory=tmp_path), lambda: snapshot(next(steps)), interval=3600
    )
    publisher.start()
    publisher.publish_now()
    published = only_reading(tmp_path).snapshot
    assert published is not None
    assert published.step == 1
    publisher.close()


def test_a_source_that_raises_is_logged_once_and_forgiven(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(1000))

    def source() -> Snapshot:
        if next(calls) < 5:
            raise RuntimeError("the engine is not ready")
        return snapshot()

    with caplog.at_level(logging.ERROR):
        publisher = Publisher(StatusWriter("gpt", directory=tmp_path), source, interval=0.01)
        publisher.start()
        until(lambda: only_reading(tmp_path).snapshot is not None)
        publisher.close()
    (record,) = caplog.records
    assert record.name.startswith("tiering.telemetry")
    assert "the engine is not ready" in (record.exc_text or "")


def test_publish_now_does_not_deadlock_with_a_source_that_needs_the_callers_lock(tmp_path: Path) -> None:
    engine = threading.RLock()

    def source() -> Snapshot:
        with engine:
            return snapshot()

    publisher = Publisher(StatusWriter("gpt", directory=tmp_path), source, interval=0.001)
    publisher.start()
    for _ in range(50):
        with engine:
            time.sleep(0.002)  # long enough for the thread to be waiting inside the source
            publisher.publish_now()
    publisher.close()
    assert find_status_files(tmp_path) == []


def test_the_end_of_the_interpreter_removes_the_file(tmp_path: Path) -> None:
    script = """
        publisher = Publisher(StatusWriter("gpt", directory=directory), lambda: snap(1))
        publisher.start()
        say(len(find_status_files(directory)))
    """
    with child(script, tmp_path) as process:
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "1\n")
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_run_does_not_fail_for_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    publisher = Publisher(StatusWriter("gpt", directory=directory), snapshot, 60)
    publisher.start()
    directory.rename(tmp_path / "moved")
    directory.write_text("another's")
    publisher.close()
    assert only_reading(tmp_path / "moved").state == "stale"


def test_a_removed_file_is_created_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    description = describing(("file", "n"))
    writer = StatusWriter("gpt", directory=directory, description=description)
    steps = iter(range(100))
    publisher = Publisher(writer, lambda: snapshot(next(steps)), 3600)
    publisher.start()
    for remove in (writer.path.unlink, lambda: shutil.rmtree(directory)):
        remove()
        assert find_status_files(directory) == []
        publisher.publish_now()
        (file,) = find_status_files(directory)
        reading = file.read()
        assert (file.path, reading.state, reading.description) == (writer.path, "live", description)
    parent = tmp_path.rename(tmp_path.with_name("elsewhere"))
    shutil.rmtree(parent / "run")
    publisher.publish_now()  # as after a logout, until the next login
    parent.rename(tmp_path)
    publisher.publish_now()
    (file,) = find_status_files(directory)
    assert file.read().snapshot.step == 4
    shutil.rmtree(directory)
    publisher.close()
    publisher.publish_now()
    assert not directory.exists()


def test_a_file_that_cannot_be_created_is_logged_once_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "directory"
    publisher = Publisher(StatusWriter("gpt", directory=directory), snapshot, interval=0.01)
    publisher.start()
    shutil.rmtree(directory)
    directory.touch()  # in the way of the new directory
    until(lambda: bool(caplog.records))
    time.sleep(0.1)
    directory.unlink()
    until(lambda: len(find_status_files(directory)) == 1)
    publisher.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (warning,) = warnings
    assert "is not a directory" in warning.getMessage() and not warning.exc_info
