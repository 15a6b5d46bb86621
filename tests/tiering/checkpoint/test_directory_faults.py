"""A save of which an operation fails leaves the old state, or all of the new one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.tiering.checkpoint.directories import (
    OURS,
    content,
    failing,
    names,
    record,
    recorded,
    save,
    tags,
)
from tiering.checkpoint import directory as module
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import LATEST, MANIFEST
from tiering.errors import CheckpointError
from tiering.storage import file_system


@pytest.mark.parametrize(
    ("tag", "where", "name", "nth"),
    [
        ("global_step2", os, "fsync", 0),  # of the partial directory
        ("global_step2", os, "fsync", 1),  # of the new latest
        ("global_step2", os, "rename", 0),
        ("global_step2", os, "fsync", 2),  # of DIR, with the tag in its place
        ("global_step2", os, "rename", 1),  # of the new latest
        ("global_step1", os, "fsync", 0),
        ("global_step1", os, "fsync", 1),
        ("global_step1", module, "exchange", 0),
        ("global_step1", os, "fsync", 2),
        ("global_step1", os, "rename", 0),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_commit_that_fails_leaves_the_old_state(
    checkpoints: CheckpointDirectory,
    monkeypatch: pytest.MonkeyPatch,
    tag: str,
    where: object,
    name: str,
    nth: int,
) -> None:
    save(checkpoints, "global_step1")
    before = content(checkpoints)
    partial = checkpoints.begin(tag, run=OURS)
    record(partial, "new")
    with (
        failing(monkeypatch, where, name, nth),
        pytest.raises(
            CheckpointError, match=r"could not store checkpoint .* Input/output error; .* see dmesg"
        ),
    ):
        checkpoints.commit(partial, tag, run=OURS, keep=1)
    assert partial.exists()
    checkpoints.discard(partial)
    assert content(checkpoints) == before
    assert names(checkpoints) == {"global_step1", LATEST, ".lock"}
    save(checkpoints, "global_step3", keep=1)
    assert names(checkpoints) == {"global_step3", LATEST, ".lock"}


def test_the_last_fsync_fails_when_all_is_in_sight(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, "global_step1", "old")
    partial = checkpoints.begin("global_step1", run=OURS)
    record(partial, "new")
    with (
        failing(monkeypatch, os, "fsync", 3),
        pytest.raises(
            CheckpointError, match=r"has the complete checkpoint 'global_step1', .* Input/output error"
        ),
    ):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert content(checkpoints).keys() == {LATEST, f"global_step1/{MANIFEST}"}
    assert recorded(checkpoints.path / "global_step1") == "new"


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS and Lustre, which answer EINVAL."""
    monkeypatch.setattr(file_system, "_RENAME_EXCHANGE", 1 << 20)


@pytest.mark.usefixtures("no_exchange")
def test_a_tag_is_replaced_by_two_renames_where_names_cannot_be_exchanged(
    checkpoints: CheckpointDirectory,
) -> None:
    save(checkpoints, "best", "old")
    save(checkpoints, "best", "new")
    assert recorded(checkpoints.path / "best") == "new"
    assert names(checkpoints) == {"best", LATEST, ".lock"}


@pytest.mark.usefixtures("no_exchange")
def test_a_crash_between_the_two_renames(checkpoints: CheckpointDirectory, tmp_path: Path) -> None:
    save(checkpoints, "global_step1", "older")
    save(checkpoints, "global_step2", "old")
    place = checkpoints.path / "global_step2"
    hidden = place.rename(checkpoints.path / ".global_step2.replaced-00000000")
    for tag in (None, "global_step2"):
        assert checkpoints.find(tag) == hidden
    assert tags(checkpoints) == ["global_step1", "global_step2"] and checkpoints.latest() == "global_step2"
    (checkpoints.path / LATEST).unlink()
    assert checkpoints.find() == hidden
    checkpoints.close()
    checkpoints.lock()
    assert names(checkpoints) == {"global_step1", "global_step2", ".lock"}
    assert recorded(place) == "old"


@pytest.mark.usefixtures("no_exchange")
@pytest.mark.parametrize("nth", range(3))
def test_two_renames_of_which_one_fails(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    save(checkpoints, "best", "old")
    before = content(checkpoints)
    partial = checkpoints.begin("best", run=OURS)
    record(partial, "new")
    with failing(monkeypatch, os, "rename", nth), pytest.raises(CheckpointError, match="Input/output error"):
        checkpoints.commit(partial, "best", run=OURS)
    checkpoints.discard(partial)
    assert content(checkpoints) == before


def test_what_has_taken_a_place_that_is_not_durable_keeps_its_files(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may still find the old name on them."""
    save(checkpoints, "best", "old")
    partial = checkpoints.begin("best", run=OURS)
    record(partial, "new")
    fsync, on = os.fsync, checkpoints.path.stat()

    def fails(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), on):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            checkpoints.commit(partial, "best", run=OURS)
        checkpoints.discard(partial)
    assert recorded(checkpoints.path / "best") == "old" and recorded(partial) == "new"
    checkpoints.discard(partial)
    assert not partial.exists()


def test_a_directory_that_cannot_be_synced_is_none_of_ours(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.lock()
    with failing(monkeypatch, os, "fsync", 1, errno.EINVAL) as calls:
        save(checkpoints, "global_step1")
    assert len(calls) == 5
    assert tags(checkpoints) == ["global_step1"]


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1024))
    assert os.statvfs(file).f_bavail == 0


def test_a_full_disk(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(2 << 20)
    directory = CheckpointDirectory(disk / "checkpoints")
    save(directory, "global_step1", "old")
    partial = directory.begin("global_step2", run=OURS)
    (partial / MANIFEST).touch()
    fill(disk / "ballast")
    try:
        with pytest.raises(CheckpointError, match="No space left on device; make room there"):
            directory.commit(partial, "global_step2", run=OURS)
        directory.discard(partial)
        fill(disk / "more ballast")  # in the blocks that were the partial's
        with pytest.raises(CheckpointError, match="No space left on device; make room there"):
            directory.begin("global_step2", run=OURS)
        directory.close()
        directory.lock()  # sweeps, and needs no space
        assert names(directory) == {"global_step1", LATEST, ".lock"}
        assert directory.find() == directory.path / "global_step1"
        (disk / "ballast").unlink()
        save(directory, "global_step2", keep=1)
        assert names(directory) == {"global_step2", LATEST, ".lock"}
    finally:
        directory.close()


def test_files_may_not_grow(checkpoints: CheckpointDirectory) -> None:
    """RLIMIT_FSIZE 0: whoever runs under it can say who holds the lock no more than write ``latest``."""
    code = f"""
import resource, signal
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
directory = CheckpointDirectory({str(checkpoints.path)!r})
partial = directory.begin("global_step1", run='ours')
(partial / "{MANIFEST}").touch()
try:
    directory.commit(partial, "global_step1", run='ours')
except CheckpointError as error:
    print(error)
directory.discard(partial)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "could not store checkpoint 'global_step1': File too large" in ran.stdout
    assert names(checkpoints) == {".lock"}
