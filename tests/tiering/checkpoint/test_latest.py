"""Which checkpoint is found: the one that latest names, the newest without it, or an error that lists them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiering.checkpoint.directories import OURS, names, save, tags
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import LATEST
from tiering.errors import CheckpointError


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has no valid tag: the tag is empty"),
        (b"../global_step1", "has no valid tag: the tag starts with a dot"),
        (b"/etc/passwd", "has no valid tag: the tag is a path"),
        (b"global_step1\nstep2", "has characters that are not printable"),
        (b"global_step1\n\n", "has characters that are not printable"),
        (b"\xff\xfe\x00", "has characters that are not printable"),
        (b"\0" * 100, "has characters that are not printable"),
        (b"x" * 1_000_000, "is longer than 200 bytes"),
        (b"latest", "is the name of the file"),
        (b"gone", "names 'gone', but this checkpoint does not exist"),
        (b"notes", "names 'notes', but this checkpoint does not exist"),
    ],
)
def test_a_latest_that_names_none(checkpoints: CheckpointDirectory, content: bytes, why: str) -> None:
    save(checkpoints, "global_step1")
    save(checkpoints, "global_step2")
    (checkpoints.path / "notes").mkdir()
    (checkpoints.path / LATEST).write_bytes(content)
    for call in (checkpoints.find, checkpoints.latest):
        with pytest.raises(
            CheckpointError, match=rf"{why}.*existing checkpoints: 'global_step1', 'global_step2'$"
        ):
            call()
    assert checkpoints.find("global_step1") == checkpoints.path / "global_step1"
    save(checkpoints, "aside", latest=False, keep=1)  # what it should have named is not for us to guess
    assert tags(checkpoints) == ["global_step1", "global_step2", "aside"]
    save(checkpoints, "global_step3")
    assert checkpoints.latest() == "global_step3"


def test_a_latest_that_an_editor_wrote(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    save(checkpoints, "global_step2")
    (checkpoints.path / LATEST).write_text("global_step1\n")
    assert checkpoints.latest() == "global_step1"


def test_a_latest_that_is_no_file(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    (checkpoints.path / LATEST).unlink()
    (checkpoints.path / LATEST).mkdir()
    with pytest.raises(
        CheckpointError, match="latest cannot be read: it is not a regular file; name a tag instead"
    ):
        checkpoints.find()
    with pytest.raises(CheckpointError, match="latest is a directory, but must be a file with a tag"):
        checkpoints.begin("global_step2", run=OURS)


def test_a_latest_that_is_a_pipe_is_refused_at_once(checkpoints: CheckpointDirectory) -> None:
    """To open one for reading waits for a writer."""
    save(checkpoints, "global_step1")
    (checkpoints.path / LATEST).unlink()
    os.mkfifo(checkpoints.path / LATEST)
    with pytest.raises(CheckpointError, match="latest cannot be read: it is not a regular file"):
        checkpoints.find()
    save(checkpoints, "global_step2")
    assert checkpoints.find() == checkpoints.path / "global_step2"


def test_a_save_between_two_looks_is_seen(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that latest named is pruned before it is looked for."""
    save(checkpoints, "global_step1")
    reading, place, calls = CheckpointDirectory(checkpoints.path), CheckpointDirectory._place, []

    def late(self: CheckpointDirectory, tag: str) -> Path | None:
        calls.append(tag)
        if self is reading and len(calls) <= 3:
            save(checkpoints, f"global_step{len(calls) + 1}", keep=1)
        return place(self, tag)

    monkeypatch.setattr(CheckpointDirectory, "_place", late)
    assert reading.find() == checkpoints.path / "global_step4"


def test_without_latest_the_newest_is_found(
    checkpoints: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        save(checkpoints, f"global_step{number}", latest=False)
    assert checkpoints.latest() is None
    assert checkpoints.find() == checkpoints.path / "global_step2"
    assert caplog.messages == [
        f"{checkpoints.path} has no file 'latest'; using 'global_step2', the newest checkpoint"
    ]


def test_a_checkpoint_is_not_the_directory_of_checkpoints(checkpoints: CheckpointDirectory) -> None:
    path = save(checkpoints, "global_step1")
    with pytest.raises(
        CheckpointError,
        match=f"is a checkpoint, not a directory of checkpoints; .*: {checkpoints.path} and 'global_step1'",
    ):
        CheckpointDirectory(path).find()


def test_a_tag_that_is_not_there(checkpoints: CheckpointDirectory) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'a'; \S+ has no checkpoints"):
        checkpoints.find("a")
    for number in range(7):
        save(checkpoints, f"global_step{number}")
    with pytest.raises(
        CheckpointError,
        match="checkpoints: 'global_step2', 'global_step3', 'global_step4', 'global_step5', 'global_step6' and 2 older",
    ):
        checkpoints.find("a")


def test_reading_writes_nothing_and_locks_nothing(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    checkpoints.close()
    reading = CheckpointDirectory(checkpoints.path)
    reading.find()
    reading.find("global_step1")
    assert reading.partials() == []
    assert names(checkpoints) == {"global_step1", LATEST}
    checkpoints.lock()
