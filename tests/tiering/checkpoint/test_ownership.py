"""Which checkpoints a save may replace."""

from __future__ import annotations

import errno
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiering.checkpoint.directories import OTHERS, OURS, failing, recorded, save
from tiering.checkpoint import run_lock
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError


def test_a_checkpoint_of_a_run_that_has_ended_is_replaced(
    checkpoints: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in ("global_step1", "global_step2"):
        save(checkpoints, tag, "old", run=OTHERS)
    checkpoints.close()
    again = CheckpointDirectory(checkpoints.path)
    for tag in ("global_step1", "global_step2", "global_step1"):
        assert recorded(save(again, tag, "new", run=OURS)) == "new"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"{again.path / 'global_step1'} is a checkpoint of an earlier run, and is replaced"
    )


def test_a_checkpoint_of_an_engine_that_trains_beside_this_one_is_not_replaced(
    checkpoints: CheckpointDirectory,
) -> None:
    """Whichever saves under the tag first; the other one would lose it."""
    other = CheckpointDirectory(checkpoints.path)
    save(checkpoints, "global_step1", run=OURS)
    with pytest.raises(CheckpointError) as refusal:
        other.begin("global_step1", run=OTHERS)
    place = checkpoints.path / "global_step1"
    assert str(refusal.value) == (
        f"[TIER-CHECKPOINT] {place} is a checkpoint of another engine of this process, which has saved it since this"
        " engine was made, and is not replaced; choose another tag, save to another directory, resume from it with"
        " load_checkpoint, or remove it"
    )
    save(checkpoints, "global_step1", run=OURS)


def test_without_locks_no_checkpoint_of_another_run_is_replaced(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, "global_step1", run=OTHERS)
    checkpoints.close()
    again = CheckpointDirectory(checkpoints.path)
    with (
        failing(monkeypatch, run_lock.fcntl, "flock", 0, errno.ENOSYS),
        pytest.raises(
            CheckpointError, match=r"the file system has no locks that would show whether that run has ended"
        ),
    ):
        again.begin("global_step1", run=OURS)


SAVER = """
import sys, time
sys.path.insert(0, {root!r})
from tests.tiering.checkpoint.directories import OTHERS, save
from tiering.checkpoint.directory import CheckpointDirectory
checkpoints = CheckpointDirectory({path!r})
save(checkpoints, "global_step1", "old", run=OTHERS)
print("saved", flush=True)
time.sleep(60)
"""


def test_a_run_in_another_process_is_waited_for_until_it_is_killed(checkpoints: CheckpointDirectory) -> None:
    code = SAVER.format(root=str(Path(__file__).parents[3]), path=str(checkpoints.path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None and run.stdout.readline() == "saved\n"
            with pytest.raises(CheckpointError, match=f"another run has locked .*: process {run.pid} on"):
                save(checkpoints, "global_step1", "new", run=OURS)
            assert recorded(checkpoints.path / "global_step1") == "old"
        finally:
            run.send_signal(signal.SIGKILL)
    assert recorded(save(checkpoints, "global_step1", "new", run=OURS)) == "new"
