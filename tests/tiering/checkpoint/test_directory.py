"""A checkpoint directory: what is in it, what its tags may be, and where there can be none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiering.checkpoint.directories import OURS, names, recorded, save, tags
from tiering.checkpoint import directory as module
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import LATEST, MANIFEST
from tiering.errors import CheckpointError

# What a save leaves


def test_a_save_leaves_the_checkpoint_its_name_and_the_lock(checkpoints: CheckpointDirectory) -> None:
    assert checkpoints.find() is None
    path = save(checkpoints, "global_step1")
    assert path == checkpoints.path / "global_step1"
    assert names(checkpoints) == {"global_step1", LATEST, ".lock"}
    assert (checkpoints.path / LATEST).read_bytes() == b"global_step1"
    assert checkpoints.find() == checkpoints.find("global_step1") == path
    assert {entry.name for entry in path.iterdir()} == {MANIFEST, "weights"}


def test_what_was_made_has_the_users_modes_not_stricter_ones(checkpoints: CheckpointDirectory) -> None:
    old = os.umask(0o027)
    try:
        path = save(checkpoints, "global_step1")
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o750
    assert (checkpoints.path / LATEST).stat().st_mode & 0o777 == 0o640


def test_a_relative_path_is_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = CheckpointDirectory("here")
    monkeypatch.chdir("/")
    assert directory.path == tmp_path / "here"


def test_a_save_that_is_not_to_be_resumed_from(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    save(checkpoints, "aside", latest=False)
    assert checkpoints.latest() == "global_step1"
    assert checkpoints.find("aside") == checkpoints.path / "aside"


def test_a_tag_is_replaced_whole(checkpoints: CheckpointDirectory) -> None:
    path = save(checkpoints, "best", "old")
    (path / "of the old one only").touch()
    assert save(checkpoints, "best", "new") == path
    assert recorded(path) == "new"
    assert {entry.name for entry in path.iterdir()} == {MANIFEST, "weights"}
    assert names(checkpoints) == {"best", LATEST, ".lock"}


def test_a_save_without_its_record_is_none(checkpoints: CheckpointDirectory) -> None:
    partial = checkpoints.begin("global_step1", run=OURS)
    with pytest.raises(CheckpointError, match="could not store checkpoint 'global_step1': No such file"):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert names(checkpoints) == {".lock"}


# Tags


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("", "is empty"),
        ("latest", "is the name of the file"),
        (".", "starts with a dot"),
        ("..", "starts with a dot"),
        (".hidden", "starts with a dot"),
        ("a/b", "is a path"),
        ("/etc", "is a path"),
        ("a\0b", "are not printable"),
        ("a\nb", "are not printable"),
        (" a", "are not printable"),
        ("a\udc80", "are not printable"),
        ("ü" * 101, "is longer than 200 bytes"),
    ],
)
def test_tags_that_are_none(checkpoints: CheckpointDirectory, tag: str, why: str) -> None:
    for call in (lambda tag: checkpoints.begin(tag, run=OURS), checkpoints.find):
        with pytest.raises(CheckpointError, match=why):
            call(tag)
    assert not checkpoints.path.exists()


@pytest.mark.parametrize("tag", ["0", "ü" * 100, "a.partial-00000000", "two words", "-rf"])
def test_tags_that_are(checkpoints: CheckpointDirectory, tag: str) -> None:
    save(checkpoints, tag)
    save(checkpoints, "other")
    save(checkpoints, tag, "again")
    assert recorded(checkpoints.find(tag) or Path()) == "again"
    assert sorted(tags(checkpoints)) == sorted([tag, "other"])
    assert checkpoints.latest() == tag


def test_what_else_has_the_name_stays(checkpoints: CheckpointDirectory, tmp_path: Path) -> None:
    save(checkpoints, "real")
    (checkpoints.path / "file").touch()
    (checkpoints.path / "notes").mkdir()
    (checkpoints.path / "link").symlink_to(checkpoints.path / "real")
    (checkpoints.path / "dangling").symlink_to(tmp_path / "nowhere")
    before = names(checkpoints)
    for tag, why in [
        ("file", "not a checkpoint .it has no checkpoint.json. and is not replaced"),
        ("notes", "not a checkpoint .it has no checkpoint.json. and is not replaced"),
        ("link", "is a symbolic link, which a save does not replace"),
        ("dangling", "is a symbolic link"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            checkpoints.begin(tag, run=OURS)
    assert names(checkpoints) == before
    assert checkpoints.find("link") == checkpoints.path / "link"
    with pytest.raises(CheckpointError, match="has no checkpoint 'dangling'"):
        checkpoints.find("dangling")


def test_a_name_that_was_taken_during_the_save(checkpoints: CheckpointDirectory) -> None:
    partial = checkpoints.begin("global_step1", run=OURS)
    (partial / MANIFEST).touch()
    (checkpoints.path / "global_step1").mkdir()
    with pytest.raises(CheckpointError, match=r"is not a.* checkpoint .* and is not replaced"):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert names(checkpoints) == {"global_step1", ".lock"}


# Places that are none


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        directory = CheckpointDirectory(path)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*ot a directory"):
            directory.begin("global_step1", run=OURS)
        with pytest.raises(CheckpointError, match="Not a directory"):
            directory.find()
        with pytest.raises(CheckpointError, match=r"has no checkpoint 'global_step1'|Not a directory"):
            directory.find("global_step1")


def test_the_directory_is_removed_under_the_run(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    partial = checkpoints.begin("global_step2", run=OURS)
    (partial / MANIFEST).touch()
    module.shutil.rmtree(checkpoints.path)
    with pytest.raises(
        CheckpointError, match="could not store checkpoint 'global_step2': No such file or directory"
    ):
        checkpoints.commit(partial, "global_step2", run=OURS)
    checkpoints.discard(partial)
    assert checkpoints.find() is None
    save(checkpoints, "global_step3")
    assert names(checkpoints) == {"global_step3", LATEST, ".lock"}
    checkpoints.begin("global_step4", run=OURS)  # the new directory is locked as the old one was
    with pytest.raises(CheckpointError, match="another engine of this process is saving to"):
        CheckpointDirectory(checkpoints.path).lock()


READ_ONLY = """
import sys
from pathlib import Path
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError
directory = CheckpointDirectory(sys.argv[1])
print(directory.find().name, directory.latest(), [saved.tag for saved in directory.tags()])
try:
    directory.begin("global_step2", run='ours')
except CheckpointError as error:
    print(error)
"""


def test_a_read_only_file_system_is_read(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    checkpoints.close()
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" || exit 77; exec "$@" "$0"'
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount, str(checkpoints.path), sys.executable, "-c", READ_ONLY],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed (Debian: package util-linux)")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a private read-only mount is not allowed here: {done.stderr.strip()}")
    assert done.stdout == (
        "global_step1 global_step1 ['global_step1']\n"
        f"[TIER-CHECKPOINT] checkpoint directory {checkpoints.path} cannot be written: Read-only file system;"
        " the file system is mounted read-only: save elsewhere, or remount it\n"
    )
