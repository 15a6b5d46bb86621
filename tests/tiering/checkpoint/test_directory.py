"""A checkpoint directory: what is in it, what becomes of it by a save, and what is never touched."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.checkpoint import directory as module
from tiering.checkpoint import run_lock
from tiering.checkpoint.directory import LATEST, CheckpointDirectory
from tiering.checkpoint.manifest import FORMAT, MANIFEST, read_sealed, write_sealed
from tiering.errors import CheckpointError, ConfigError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[CheckpointDirectory]:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    yield directory
    directory.close()


OURS, OTHERS = "ours", "others"  # runs


def save(
    directory: CheckpointDirectory,
    tag: str,
    content: str = "",
    *,
    run: str = OURS,
    latest: bool = True,
    keep: int | None = None,
) -> Path:
    partial = directory.begin(tag, run=run)
    record(partial, content or tag, run)
    (partial / "weights").write_text(f"weights of {content or tag}")
    return directory.commit(partial, tag, run=run, latest=latest, keep=keep)


def record(path: Path, content: str = "", run: str = OURS) -> None:
    """Make ``path`` a checkpoint."""
    write_sealed(path / MANIFEST, {"format": FORMAT, "run": run, "what": content})


def recorded(path: Path) -> str:
    what: str = read_sealed(path / MANIFEST)["what"]
    return what


def names(directory: CheckpointDirectory) -> set[str]:
    return {entry.name for entry in directory.path.iterdir()}


def tags(directory: CheckpointDirectory) -> list[str]:
    return [saved.tag for saved in directory.tags()]


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
    with pytest.raises(CheckpointError, match="could not take checkpoint 'global_step1': No such file"):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert names(checkpoints) == {".lock"}


# Tags


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        ("", "is empty"),
        ("latest", "is the name of the file"),
        (".", "begins with a dot"),
        ("..", "begins with a dot"),
        (".hidden", "begins with a dot"),
        ("a/b", "is a path"),
        ("/etc", "is a path"),
        ("a\0b", "do not print"),
        ("a\nb", "do not print"),
        (" a", "do not print"),
        ("a\udc80", "do not print"),
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
        ("file", "no checkpoint .it has no checkpoint.json. and stays"),
        ("notes", "no checkpoint .it has no checkpoint.json. and stays"),
        ("link", "is a symbolic link, which is read but not replaced"),
        ("dangling", "is a symbolic link"),
    ]:
        with pytest.raises(CheckpointError, match=why):
            checkpoints.begin(tag, run=OURS)
    assert names(checkpoints) == before
    assert checkpoints.find("link") == checkpoints.path / "link"
    with pytest.raises(CheckpointError, match="holds no checkpoint 'dangling'"):
        checkpoints.find("dangling")


def test_a_name_that_was_taken_during_the_save(checkpoints: CheckpointDirectory) -> None:
    partial = checkpoints.begin("global_step1", run=OURS)
    (partial / MANIFEST).touch()
    (checkpoints.path / "global_step1").mkdir()
    with pytest.raises(CheckpointError, match=r"is no checkpoint .* and stays"):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert names(checkpoints) == {"global_step1", ".lock"}


# Order and pruning


def at(directory: CheckpointDirectory, tag: str, time: int) -> None:
    os.utime(directory.path / tag / MANIFEST, (time, time))


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
    with pytest.raises(
        CheckpointError, match=r"global_step3 is a checkpoint of another run.*and stays; save to"
    ):
        checkpoints.begin("global_step3", run=OURS)
    theirs = {f"global_step{number}" for number in range(5)}
    assert names(checkpoints) == theirs | {"global_step8", "global_step9", LATEST, ".lock"}
    assert content(checkpoints).items() >= {(f, text) for f, text in before.items() if f != LATEST}


@pytest.mark.parametrize(
    "text",
    [
        '{"checkpoint": "of another program"}',
        "",
        '{"crc32": "00000000", "content": {"format": "tiering-checkpoint", "run": "ours"}}',
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
            CheckpointError, match=r"is no checkpoint \(its checkpoint.json is another program's"
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
    with pytest.raises(ConfigError, match=f"keep is {keep}"):
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
    assert "global_step1 stays: Operation not permitted" in caplog.text
    assert tags(checkpoints) == ["global_step1", "global_step2"]
    save(checkpoints, "global_step3", keep=1)
    assert tags(checkpoints) == ["global_step3"]


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
    assert caplog.text.count("is of no use: Input/output error") == 2
    assert tags(checkpoints) == ["global_step2"]
    assert len(checkpoints.partials()) == 2
    checkpoints.close()
    checkpoints.lock()
    assert names(checkpoints) == {"global_step2", LATEST, ".lock"}


# What went wrong before: partials


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


# What fails leaves the old state


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, nth: int, code: int = errno.EIO
) -> Iterator[list[int]]:
    """The ``nth`` call of ``where.name`` fails, and does nothing."""
    original = getattr(where, name)
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(len(calls))
        if len(calls) == nth + 1:
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        yield calls


def content(directory: CheckpointDirectory) -> dict[str, str]:
    files = [file for file in directory.path.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(directory.path)): file.read_text() for file in files}


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
        ("global_step1", module, "_exchange", 0),
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
            CheckpointError, match=r"could not take checkpoint .* Input/output error; .* see dmesg"
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
        pytest.raises(CheckpointError, match=r"has checkpoint 'global_step1', whole, .* Input/output error"),
    ):
        checkpoints.commit(partial, "global_step1", run=OURS)
    checkpoints.discard(partial)
    assert content(checkpoints).keys() == {LATEST, f"global_step1/{MANIFEST}"}
    assert recorded(checkpoints.path / "global_step1") == "new"


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS and Lustre, which answer EINVAL."""
    monkeypatch.setattr(module, "_RENAME_EXCHANGE", 1 << 20)


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
    assert "could not take checkpoint 'global_step1': File too large" in ran.stdout
    assert names(checkpoints) == {".lock"}


# Places that are none


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        directory = CheckpointDirectory(path)
        with pytest.raises(CheckpointError, match=r"cannot be saved to: .*ot a directory"):
            directory.begin("global_step1", run=OURS)
        with pytest.raises(CheckpointError, match="Not a directory"):
            directory.find()
        with pytest.raises(CheckpointError, match=r"holds no checkpoint 'global_step1'|Not a directory"):
            directory.find("global_step1")


def test_the_directory_is_removed_under_the_run(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    partial = checkpoints.begin("global_step2", run=OURS)
    (partial / MANIFEST).touch()
    module.shutil.rmtree(checkpoints.path)
    with pytest.raises(
        CheckpointError, match="could not take checkpoint 'global_step2': No such file or directory"
    ):
        checkpoints.commit(partial, "global_step2", run=OURS)
    checkpoints.discard(partial)
    assert checkpoints.find() is None
    save(checkpoints, "global_step3")
    assert names(checkpoints) == {"global_step3", LATEST, ".lock"}
    with pytest.raises(
        CheckpointError, match="another run"
    ):  # the new directory is locked as the old one was
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
        pytest.skip("no unshare command")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a private read-only mount is not allowed here: {done.stderr.strip()}")
    assert done.stdout == (
        "global_step1 global_step1 ['global_step1']\n"
        f"[TIER-CHECKPOINT] checkpoint directory {checkpoints.path} cannot be saved to: Read-only file system;"
        " the file system is mounted read-only: save where you may write, or remount it\n"
    )


# latest


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "holds no tag, for it is empty"),
        (b"../global_step1", "holds no tag, for it begins with a dot"),
        (b"/etc/passwd", "holds no tag, for it is a path"),
        (b"global_step1\nstep2", "has characters that do not print"),
        (b"global_step1\n\n", "has characters that do not print"),
        (b"\xff\xfe\x00", "has characters that do not print"),
        (b"\0" * 100, "has characters that do not print"),
        (b"x" * 1_000_000, "is longer than 200 bytes"),
        (b"latest", "is the name of the file"),
        (b"gone", "names 'gone', but there is no such checkpoint"),
        (b"notes", "names 'notes', but there is no such checkpoint"),
    ],
)
def test_a_latest_that_names_none(checkpoints: CheckpointDirectory, content: bytes, why: str) -> None:
    save(checkpoints, "global_step1")
    save(checkpoints, "global_step2")
    (checkpoints.path / "notes").mkdir()
    (checkpoints.path / LATEST).write_bytes(content)
    for call in (checkpoints.find, checkpoints.latest):
        with pytest.raises(
            CheckpointError, match=rf"{why}.*name one that is there: 'global_step1', 'global_step2'$"
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
    with pytest.raises(CheckpointError, match="latest cannot be read: Is a directory"):
        checkpoints.find()
    with pytest.raises(CheckpointError, match="latest is a directory, where a file with a tag belongs"):
        checkpoints.begin("global_step2", run=OURS)


def test_without_latest_the_newest_is_found(
    checkpoints: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        save(checkpoints, f"global_step{number}", latest=False)
    assert checkpoints.latest() is None
    assert checkpoints.find() == checkpoints.path / "global_step2"
    assert caplog.messages == [
        f"{checkpoints.path} has no file 'latest'; 'global_step2', the newest checkpoint there, is taken"
    ]


def test_a_checkpoint_is_not_the_directory_of_checkpoints(checkpoints: CheckpointDirectory) -> None:
    path = save(checkpoints, "global_step1")
    with pytest.raises(
        CheckpointError, match=f"is itself a checkpoint; .*: {checkpoints.path} and 'global_step1'"
    ):
        CheckpointDirectory(path).find()


def test_a_tag_that_is_not_there(checkpoints: CheckpointDirectory) -> None:
    with pytest.raises(CheckpointError, match=r"holds no checkpoint 'a'; \S+ holds no checkpoint at all"):
        checkpoints.find("a")
    for number in range(7):
        save(checkpoints, f"global_step{number}")
    with pytest.raises(
        CheckpointError,
        match="there: 'global_step2', 'global_step3', 'global_step4', 'global_step5', 'global_step6' and 2 older",
    ):
        checkpoints.find("a")


def test_reading_writes_nothing_and_locks_nothing(checkpoints: CheckpointDirectory) -> None:
    save(checkpoints, "global_step1")
    checkpoints.close()
    (checkpoints.path / ".lock").unlink()
    reading = CheckpointDirectory(checkpoints.path)
    reading.find()
    reading.find("global_step1")
    assert reading.partials() == []
    assert names(checkpoints) == {"global_step1", LATEST}
    checkpoints.lock()


# One run at a time


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
