"""One run at a time saves to a directory, and leaves it to others however it ends."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys

import pytest

from tests.tiering.checkpoint.directories import (
    OURS,
    failing,
    save,
)
from tiering.checkpoint import run_lock
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError


def test_two_engines_of_one_process_exclude_each_other(checkpoints: CheckpointDirectory) -> None:
    checkpoints.lock()
    other = CheckpointDirectory(checkpoints.path)
    partial = checkpoints.begin("global_step1", run=OURS)
    with pytest.raises(CheckpointError) as caught:
        other.begin("global_step1", run=OURS)
    assert str(caught.value) == (
        f"[TIER-CHECKPOINT] another run saves to {checkpoints.path}: process {os.getpid()} on {os.uname().nodename};"
        " let it end, close the engine that holds it, or save to another directory"
    )
    assert partial.exists()
    checkpoints.close()
    save(other, "global_step1")
    with pytest.raises(CheckpointError, match="another run"):
        checkpoints.lock()
    other.close()


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
    with pytest.raises(CheckpointError) as caught:
        CheckpointDirectory(checkpoints.path).lock()
    assert f"another run saves to {checkpoints.path}: " in str(caught.value)
    assert "\x1b" not in str(caught.value)


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
    assert (
        "has no locks (Function not implemented): two runs that save there are not told apart" in caplog.text
    )
    left = checkpoints.begin("global_step1", run=OURS)
    checkpoints.close()
    with failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.ENOLCK):
        save(checkpoints, "global_step1")
    assert checkpoints.partials() == [left]
    checkpoints.close()
    with (
        failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.EIO),
        pytest.raises(CheckpointError, match="cannot be saved to: Input/output error"),
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
