"""What a save removes: older checkpoints, what a crash has left, and never what is not its own."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiering.checkpoint.directories import (
    OTHERS,
    OURS,
    at,
    content,
    names,
    record,
    recorded,
    save,
    tags,
)
from tiering.checkpoint import directory as module
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import LATEST, MANIFEST
from tiering.errors import CheckpointError, ConfigError


def test_tags_are_in_the_order_of_their_records(checkpoints: CheckpointDirectory) -> None:
    for tag, time in [("global_step9", 50), ("global_step10", 50), ("a", 60), ("z", 40)]:
        save(checkpoints, tag)
        at(checkpoints, tag, time)
    (checkpoints.path / "no-checkpoint").mkdir()
    assert checkpoints.tags() == [("z", 40.0), ("global_step9", 50.0), ("global_step10", 50.0), ("a", 60.0)]


def test_keep_leaves_the_newest(checkpoints: CheckpointDirectory) -> None:
    for number in range(8, 13):
        save(checkpoints, f"global_step{number}", keep=2)
        assert tags(checkpoints) == [f"global_step{n}" for n in range(max(8, number - 1), number + 1)]
    assert names(checkpoints) == {"global_step11", "global_step12", LATEST, ".lock"}


def test_replacing_a_tag_makes_it_the_newest(checkpoints: CheckpointDirectory) -> None:
    for time, number in enumerate([1, 2, 3, 1]):
        save(checkpoints, f"global_step{number}", f"save {time}")
        at(checkpoints, f"global_step{number}", time)
    save(checkpoints, "global_step4", keep=2)
    assert tags(checkpoints) == ["global_step1", "global_step4"]


def test_keep_is_about_default_tags(checkpoints: CheckpointDirectory) -> None:
    """Who names a checkpoint wants to have it."""
    for tag in ("best", "global_step", "global_step1a", "a_global_step1", "global_step-1"):
        save(checkpoints, tag, latest=False)
        at(checkpoints, tag, 1)
    named = names(checkpoints)
    for number in range(4):
        save(checkpoints, f"global_step{number}", keep=2)
    assert names(checkpoints) == named | {"global_step2", "global_step3", LATEST}
    save(checkpoints, "aside", keep=1)
    assert names(checkpoints) == named | {"global_step3", "aside", LATEST}


def test_another_runs_checkpoints_stay(checkpoints: CheckpointDirectory) -> None:
    for number in range(5):
        save(checkpoints, f"global_step{number}", run=OTHERS)
    before = content(checkpoints)
    for number in range(5, 10):
        save(checkpoints, f"global_step{number}", run=OURS, keep=2)
    theirs = {f"global_step{number}" for number in range(5)}
    assert names(checkpoints) == theirs | {"global_step8", "global_step9", LATEST, ".lock"}
    assert content(checkpoints).items() >= {(f, text) for f, text in before.items() if f != LATEST}


@pytest.mark.parametrize(
    "text",
    [
        '{"checkpoint": "of another program"}',
        "",
        '{"crc32": "00000000", "content": {"format": "tiering-checkpoint", "run": "ours"}}',
        '{"crc32": "00000000", "content": {"format": "tiering-checkpoint", "run": "ours", "step": 1e999}}',
    ],
)
def test_other_programs_and_damaged_records_are_no_checkpoints(
    checkpoints: CheckpointDirectory, text: str
) -> None:
    for name in ("global_step1", "thesis"):
        (checkpoints.path / name).mkdir(parents=True)
        (checkpoints.path / name / MANIFEST).write_text(text)
        at(checkpoints, name, 1)
    mine = content(checkpoints)
    assert checkpoints.tags() == [] and checkpoints.find() is None
    assert [each.tag for each in checkpoints.damaged()] == (
        ["global_step1", "thesis"] if "crc32" in text else []
    )
    for number in range(2, 5):
        save(checkpoints, f"global_step{number}", keep=1)
    for name in ("global_step1", "thesis"):
        with pytest.raises(
            CheckpointError,
            match=r"is not a valid checkpoint \(its checkpoint.json is damaged or of another program",
        ):
            checkpoints.begin(name, run=OURS)
    assert names(checkpoints) == {"global_step1", "thesis", "global_step4", LATEST, ".lock"}
    assert content(checkpoints).items() >= mine.items()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*(f"global_step{number}" for number in range(4)), "best"]),
            st.booleans(),
            st.sampled_from([None, 1, 2, 3]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_what_stays_after_any_saves(memory: Path, saves: list[tuple[str, bool, int | None]]) -> None:
    stays: list[str] = []  # oldest first
    named = None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        directory = CheckpointDirectory(place)
        for number, (tag, latest, keep) in enumerate(saves):
            partial = directory.begin(tag, run=OURS)
            record(partial, str(number))
            os.utime(partial / MANIFEST, (number, number))
            directory.commit(partial, tag, run=OURS, latest=latest, keep=keep)
            stays = [other for other in stays if other != tag] + [tag]
            named = tag if latest else named
            if keep is not None:
                counted = [other for other in stays if other != "best"]
                stays = [other for other in stays if other not in counted[:-keep] or other in (tag, named)]
            assert tags(directory) == stays
            assert directory.latest() == named
            assert names(directory) == {*stays, ".lock"} | ({LATEST} if named else set())
            assert recorded(directory.path / tag) == str(number)
        directory.close()


@pytest.mark.parametrize("keep", [0, -1])
def test_a_save_keeps_at_least_its_own(checkpoints: CheckpointDirectory, keep: int) -> None:
    with pytest.raises(ConfigError, match=f"invalid keep={keep}"):
        save(checkpoints, "global_step1", keep=keep)


def test_pruning_spares_what_latest_and_links_name(checkpoints: CheckpointDirectory, tmp_path: Path) -> None:
    for number in range(4):
        save(checkpoints, f"global_step{number}", latest=number == 1)
        at(checkpoints, f"global_step{number}", number)
    (checkpoints.path / "best").symlink_to("global_step2")
    save(checkpoints, "aside", latest=False, keep=1)
    assert sorted(tags(checkpoints)) == ["aside", "best", "global_step1", "global_step2", "global_step3"]
    assert checkpoints.latest() == "global_step1"


def test_pruning_spares_its_own_when_the_clock_went_back(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    at(checkpoints, "global_step1", 2**40)
    save(checkpoints, "global_step0", latest=False, keep=1)
    assert tags(checkpoints) == ["global_step0", "global_step1"]  # "global_step1" is still what latest names
    save(checkpoints, "global_step2", keep=1)
    assert sorted(tags(checkpoints)) == ["global_step1", "global_step2"]


def test_pruning_removes_nothing_but_checkpoints(checkpoints: CheckpointDirectory, tmp_path: Path) -> None:
    elsewhere = CheckpointDirectory(tmp_path / "elsewhere")
    outside = save(elsewhere, "outside")
    elsewhere.close()
    at(elsewhere, "outside", 1)
    checkpoints.lock()
    (checkpoints.path / "linked").symlink_to(outside)
    (checkpoints.path / "notes").mkdir()
    (checkpoints.path / "notes" / "text").write_text("mine")
    (checkpoints.path / "file").touch()
    (checkpoints.path / ".hidden").mkdir()
    (checkpoints.path / ".hidden" / MANIFEST).touch()
    mine = names(checkpoints)
    for number in range(3):
        save(checkpoints, f"global_step{number}", keep=1)
    assert names(checkpoints) == mine | {"global_step2", LATEST}
    assert (outside / "weights").read_text() == "weights of outside"


def test_what_cannot_be_pruned_is_a_warning(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, "global_step1")
    rename = os.rename

    def refuse(source: Path, *rest: object) -> None:
        if Path(source).name == "global_step1":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        rename(source, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        save(checkpoints, "global_step2", keep=1)
    assert "global_step1 is not removed: Operation not permitted" in caplog.text
    assert tags(checkpoints) == ["global_step1", "global_step2"]
    save(checkpoints, "global_step3", keep=1)
    assert tags(checkpoints) == ["global_step3"]


def test_nothing_that_fails_in_pruning_fails_the_save(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, "global_step1")

    def refuse(path: Path) -> None:
        raise RecursionError("a directory that is too deep")

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", refuse)
        save(checkpoints, "global_step2", keep=1)
    assert (
        f"old checkpoints in {checkpoints.path} are not removed: a directory that is too deep" in caplog.text
    )
    assert tags(checkpoints) == ["global_step2"]


def test_what_cannot_be_removed_is_a_warning_and_goes_later(
    checkpoints: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, "global_step1")

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", refuse)
        save(checkpoints, "global_step2", keep=1)
        save(checkpoints, "global_step2", "again")
    assert caplog.text.count("is not needed and could not be removed: Input/output error") == 2
    assert tags(checkpoints) == ["global_step2"]
    assert len(checkpoints.partials()) == 2
    checkpoints.close()
    checkpoints.lock()
    assert names(checkpoints) == {"global_step2", LATEST, ".lock"}


def test_the_next_run_sweeps_what_a_crash_left(checkpoints: CheckpointDirectory, tmp_path: Path) -> None:
    save(checkpoints, "global_step1")
    partial = checkpoints.begin("global_step2", run=OURS)
    (partial / "weights").touch()
    (partial / "below").mkdir()
    (checkpoints.path / ".latest.partial-00000000").write_text("global_step2")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (checkpoints.path / ".x.partial-00000001").symlink_to(tmp_path / "precious")
    mine = {
        ".partial-00000000",
        ".x.partial-0000000",
        ".x.partial-0000000g",
        "x.partial-00000000",
        ".x.partial-000000000",
    }
    for name in mine:
        (checkpoints.path / name).mkdir()
    assert len(checkpoints.partials()) == 3
    checkpoints.lock()  # held already: a save may be under way
    assert partial.exists()
    checkpoints.close()
    checkpoints.lock()
    assert names(checkpoints) == mine | {"global_step1", LATEST, ".lock"}
    assert (tmp_path / "precious" / "file").exists()


def test_discard_takes_partials_only(checkpoints: CheckpointDirectory) -> None:
    path = save(checkpoints, "global_step1")
    with pytest.raises(AssertionError):
        checkpoints.discard(path)
    checkpoints.discard(checkpoints.path / ".gone.partial-00000000")
    assert tags(checkpoints) == ["global_step1"]
