"""One run at a time saves to a directory, and leaves it to others however it ends."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.tiering.checkpoint.directories import OTHERS, OURS, failing, names, record, save, tags
from tiering.checkpoint import run_lock
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError


def test_an_engine_takes_over_from_another_one_of_its_process_between_saves(
    checkpoints: CheckpointDirectory,
) -> None:
    """Who builds an engine anew need not have closed the old one; each prunes what it has saved itself."""
    other = CheckpointDirectory(checkpoints.path)
    for number in range(3):
        save(checkpoints, f"global_step{2 * number}", run=OURS, keep=1)
        save(other, f"global_step{2 * number + 1}", run=OTHERS, keep=1)
    assert tags(checkpoints) == ["global_step4", "global_step5"]
    assert checkpoints.latest() == "global_step5"
    with pytest.raises(CheckpointError, match="is a checkpoint of another engine of this process"):
        save(checkpoints, "global_step5", run=OURS)
    save(other, "global_step6", run=OTHERS)
    checkpoints.close()  # the other one has the lock, and keeps it
    assert refused_elsewhere(other.path) == (
        f"[TIER-CHECKPOINT] another run has locked {other.path}: process {os.getpid()} on {os.uname().nodename};"
        " wait until it ends, close its engine, or save to another directory"
    )
    other.close()
    assert refused_elsewhere(other.path) == ""


def test_an_engine_that_is_saving_is_not_disturbed(checkpoints: CheckpointDirectory) -> None:
    other = CheckpointDirectory(checkpoints.path)
    partial = checkpoints.begin("global_step1", run=OURS)
    with pytest.raises(CheckpointError) as caught:
        other.begin("global_step2", run=OTHERS)
    assert str(caught.value) == (
        f"[TIER-CHECKPOINT] another engine of this process is saving to {checkpoints.path}; wait for its save with"
        " wait() or close(), or save to another directory"
    )
    assert partial.exists()
    checkpoints.discard(partial)
    save(other, "global_step2", run=OTHERS)
    partial = checkpoints.begin("global_step3", run=OURS)
    record(partial)
    checkpoints.commit(partial, "global_step3", run=OURS)
    save(other, "global_step4", run=OTHERS)
    assert tags(other) == ["global_step2", "global_step3", "global_step4"]


def test_threads_that_save_at_once_are_one_after_the_other(checkpoints: CheckpointDirectory) -> None:
    """Whatever they meet, no save sweeps what another one is writing."""
    directories = [CheckpointDirectory(checkpoints.path) for _ in range(4)]
    failed: list[BaseException] = []

    def saving(number: int) -> None:
        for step in range(20):
            try:
                save(directories[number], f"run{number}_{step}", run=str(number), latest=False)
            except CheckpointError as error:
                if "another engine of this process is saving" not in str(error):
                    failed.append(error)

    threads = [threading.Thread(target=saving, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    complete = tags(checkpoints)
    assert complete
    assert all((checkpoints.path / tag / "weights").read_text() == f"weights of {tag}" for tag in complete)
    assert checkpoints.partials() == []
    for directory in directories:
        directory.close()


def test_who_gives_the_lock_back_leaves_no_file(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    assert names(checkpoints) == {"global_step1", "latest", ".lock"}
    checkpoints.close()
    assert names(checkpoints) == {"global_step1", "latest"}


def test_a_lock_whose_file_was_removed_before_it_came_is_none(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder may give it back between our opening of the file and our locking of it."""
    checkpoints.lock()
    flock, calls = run_lock.fcntl.flock, []

    def late(fd: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            checkpoints.close()
        flock(fd, how)

    other = CheckpointDirectory(checkpoints.path)
    with monkeypatch.context() as patched:
        patched.setattr(run_lock.fcntl, "flock", late)
        other.lock()
    assert (checkpoints.path / ".lock").exists()
    assert "another run has locked" in refused_elsewhere(checkpoints.path)
    other.close()


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "directory"])
def test_a_lock_that_is_no_file_is_refused_and_leads_nowhere(
    checkpoints: CheckpointDirectory, tmp_path: Path, kind: str
) -> None:
    mine, lock = tmp_path / "mine", checkpoints.path / ".lock"
    checkpoints.path.mkdir()
    if kind == "link":
        mine.write_text("precious")
    if kind.startswith("link"):
        lock.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    with pytest.raises(
        CheckpointError, match=r"\.lock is not a regular file, .*; remove it, or save to another"
    ):
        save(checkpoints, "global_step1")
    if kind == "link":
        assert mine.read_text() == "precious"
    assert mine.exists() == (kind == "link")
    lock.rmdir() if kind == "directory" else lock.unlink()
    save(checkpoints, "global_step1")


def test_what_another_program_keeps_under_that_name_stays(checkpoints: CheckpointDirectory) -> None:
    checkpoints.path.mkdir()
    (checkpoints.path / ".lock").write_text("of another program")
    checkpoints.lock()
    assert (checkpoints.path / ".lock").read_text() == "of another program"


def test_what_nobody_has_any_more_holds_no_lock(checkpoints: CheckpointDirectory) -> None:
    """A notebook makes its engine anew and forgets to close the old one."""
    forgotten = CheckpointDirectory(checkpoints.path)
    forgotten.lock()
    del forgotten
    checkpoints.lock()


@pytest.mark.parametrize("text", [b"", b"\x1b[2J", b"\xff"])
def test_a_holder_that_does_not_say_who_it_is(checkpoints: CheckpointDirectory, text: bytes) -> None:
    checkpoints.lock()
    (checkpoints.path / ".lock").write_bytes(text)
    message = refused_elsewhere(checkpoints.path)
    assert f"another run has locked {checkpoints.path}: " in message
    assert "\x1b" not in message


TRY = """
import sys
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError
directory = CheckpointDirectory(sys.argv[1])
try:
    directory.lock()
except CheckpointError as error:
    print(error, end="")
directory.close()
"""


def refused_elsewhere(path: Path) -> str:
    """What another process is told that wants to save there; empty if it may."""
    command = [sys.executable, "-c", TRY, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


HOLD = """
import os, sys, time
from tiering.checkpoint.directory import CheckpointDirectory
directory = CheckpointDirectory(sys.argv[1])
directory.begin("global_step1", run='ours')
child = os.fork()  # as a data loader's worker
if child == 0:
    directory.close()  # what it closes is its own
    print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_killed_run_holds_nothing_though_its_child_lives(checkpoints: CheckpointDirectory) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(checkpoints.path)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout
    with run:
        word, child = run.stdout.readline().split()
        assert word == "ready"
        try:
            with pytest.raises(CheckpointError, match=f"process {run.pid} on "):
                checkpoints.lock()
            run.kill()
            run.wait()
            os.kill(int(child), 0)
            assert len(checkpoints.partials()) == 1
            checkpoints.lock()
            assert checkpoints.partials() == []
        finally:
            run.kill()
            os.kill(int(child), signal.SIGKILL)


def test_where_there_are_no_locks_nothing_of_others_is_swept(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.ENOSYS):
        checkpoints.lock()
    assert "has no locks (Function not implemented): two runs that save there are not detected" in caplog.text
    partial = checkpoints.begin("global_step1", run=OURS)
    checkpoints.close()
    with failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.ENOLCK):
        save(checkpoints, "global_step1")
    assert checkpoints.partials() == [partial]
    checkpoints.close()
    with (
        failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.EIO),
        pytest.raises(CheckpointError, match="cannot be written: Input/output error"),
    ):
        checkpoints.lock()
    checkpoints.lock()
    assert checkpoints.partials() == []


def test_it_says_so_in_the_log_only_when_it_must(
    checkpoints: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            save(checkpoints, "global_step1", keep=1)
        checkpoints.find()
    assert caplog.messages == []
