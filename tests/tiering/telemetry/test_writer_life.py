"""A writer that is killed, stopped or forked: its lock shows whether it lives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.tiering.telemetry.status_files import child, first_line, only_reading, until
from tiering.telemetry import (
    StatusReading,
    StatusWriter,
    find_status_files,
    sweep,
)
from tiering.telemetry import status_file as status_module


def test_a_killed_writer_leaves_a_stale_file_that_the_next_one_sweeps(tmp_path: Path) -> None:
    script = (
        'w = StatusWriter("gpt", directory=directory); w.publish(snap(41)); say("ready"); time.sleep(600)'
    )
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        assert only_reading(tmp_path).state == "live"
        assert sweep(tmp_path) == []
        process.kill()
        process.wait()
    reading = only_reading(tmp_path)
    assert (reading.state, reading.reason) == ("stale", "the writer is gone")
    assert reading.snapshot is not None
    assert reading.snapshot.step == 41
    (dead,) = find_status_files(tmp_path)
    assert sweep(tmp_path, keep_seconds=3600) == []
    os.utime(dead.path, (time.time() + 3600,) * 2)  # as after a clock was set back
    writer = StatusWriter("next", directory=tmp_path)
    assert [file.path for file in find_status_files(tmp_path)] == [writer.path]
    assert dead.read() == StatusReading("stale", None, None, "the status file has been removed")
    writer.close()


def test_a_stopped_writer_is_live_and_old(tmp_path: Path) -> None:
    script = 'w = StatusWriter("gpt", directory=directory); w.publish(snap(1)); say("ready"); time.sleep(600)'
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGSTOP)
        before = only_reading(tmp_path)
        until(lambda: (only_reading(tmp_path).heartbeat_age or 0) > (before.heartbeat_age or 0) + 0.05)
        assert only_reading(tmp_path).state == "live"


def test_death_in_the_middle_of_an_update_is_stale_without_content(tmp_path: Path) -> None:
    script = """
        writer = StatusWriter("gpt", directory=directory)
        writer.publish(snap(1))
        os.pwrite(writer._fd, (3).to_bytes(8, "little"), 24)
        say("ready")
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        assert first_line(process) == "ready"
        process.kill()
        process.wait()
    reading = only_reading(tmp_path)
    assert (reading.state, reading.snapshot) == ("stale", None)
    assert reading.reason == "the writer died during an update"


def test_a_forked_child_neither_holds_the_lock_nor_removes_the_file(tmp_path: Path) -> None:
    script = """
        writer = StatusWriter("gpt", directory=directory)
        publisher = Publisher(writer, lambda: snap(5), 0.01)
        publisher.start()
        locks = writer._lock, publisher._lock
        for lock in locks: lock.acquire()  # as if the publishing thread were in the middle of it
        pid = os.fork()
        if pid == 0:
            writer.publish(snap(99))
            publisher.publish_now()
            publisher.close()
            writer.close()
            say("child done")
            time.sleep(600)
        for lock in locks: lock.release()
        sys.stdin.read()
        os.kill(pid, 9)
        say("parent done")
        os.kill(os.getpid(), 9)
    """
    with child(script, tmp_path) as process:
        assert first_line(process) == "child done"
        reading = only_reading(tmp_path)
        assert (reading.state, reading.snapshot and reading.snapshot.step) == ("live", 5)
        assert process.stdin is not None
        process.stdin.close()
        assert first_line(process) == "parent done"
        process.wait()
    assert only_reading(tmp_path).state == "stale"


def test_a_surviving_child_does_not_make_a_dead_run_look_alive(tmp_path: Path) -> None:
    script = """
        writer = StatusWriter("gpt", directory=directory)
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        say(pid)
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        orphan = int(first_line(process))
        try:
            process.kill()
            process.wait()
            until(lambda: only_reading(tmp_path).state == "stale")
            os.kill(orphan, 0)  # the child lives, and holds no lock
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_child_forked_while_a_file_is_created_does_not_keep_its_lock(tmp_path: Path) -> None:
    script = """
        import threading
        def fork():
            if os.fork() == 0:
                say(os.getpid())
                time.sleep(600)
        forking = threading.Thread(target=fork)
        reserve = os.posix_fallocate
        def interrupted(*arguments):
            forking.start()
            forking.join(0.3)  # it waits until the file is created
            reserve(*arguments)
        os.posix_fallocate = interrupted
        writer = StatusWriter("gpt", directory=directory)
        forking.join()
        time.sleep(600)
    """
    with child(script, tmp_path) as process:
        orphan = int(first_line(process))
        try:
            (file,) = find_status_files(tmp_path)
            assert file.read().state == "live"
            process.kill()
            process.wait()
            until(lambda: file.read().state == "stale")
        finally:
            os.kill(orphan, signal.SIGKILL)


def test_a_file_under_construction_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, leftover = tmp_path / "gpt.0.1-aa.new", tmp_path / "gpt.0.2-bb.new"
    fresh.touch()
    leftover.touch()
    os.utime(leftover, (time.time() - 3600,) * 2)
    foreign = tmp_path / "thesis.new"  # in a directory that somebody else uses, too
    foreign.touch()
    os.utime(foreign, (time.time() - 3600,) * 2)
    assert sweep(tmp_path) == [leftover]
    assert fresh.exists() and foreign.exists()
    assert find_status_files(tmp_path) == []
    # A sweeper that stops while it holds the lock would block the writer.
    with monkeypatch.context() as patch:
        patch.setattr(status_module.fcntl, "flock", lambda *_: pytest.fail("acquired the lock"))
        assert sweep(tmp_path) == []
