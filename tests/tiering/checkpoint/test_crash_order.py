"""The power goes, after any operation of a save, and takes any part of what was not fsynced.

A few saves are recorded. Every directory that a power cut could leave of them is then built, read, and saved into.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.tiering.checkpoint.operations import intercepted, no_exchange
from tests.tiering.checkpoint.power_cuts import Crash, Recorder, Recording, Returned, Synced, Tree
from tests.tiering.checkpoint.saving import RUN, number_of, write_checkpoint
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError
from tiering.weights.tensor_file import Output

# Tag and keep of save 1, 2, ...: new tags and replaced ones, and all that pruning can remove.
SAVES = [
    (f"global_step{number}", keep)
    for number, keep in [(1, None), (2, 1), (2, 1), (3, 2), (4, 2), (3, None), (5, 1)]
]
ANOTHER = 99
BELOW = Path("runs", "mine")  # of the recorded root: where the checkpoints are


@pytest.fixture(scope="module", params=["exchanged", "renamed"])
def recording(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Recording]:
    """Saves where names can change places, and where they cannot."""
    root = tmp_path_factory.mktemp("recorded")
    recorder = Recorder(root)
    recorder.note_names(root)
    directory = CheckpointDirectory(root / BELOW)
    with (
        Output(IoConfig(engine="threads")) as output,
        no_exchange() if request.param == "renamed" else nullcontext(),
        intercepted(recorder),
    ):
        for number, (tag, keep) in enumerate(SAVES[:4] if request.param == "renamed" else SAVES, 1):
            partial = directory.begin(tag, run=RUN)
            write_checkpoint(partial, number, output)
            directory.commit(partial, tag, run=RUN, keep=keep)
            recorder.events.append(Returned(number))
    directory.close()
    yield Recording(root.stat().st_ino, {*recorder.directories}, recorder.events)
    for fd in recorder.held.values():
        os.close(fd)


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to be saved next."""
    path = tmp_path_factory.mktemp("another")
    with Output(IoConfig(engine="threads")) as output:
        write_checkpoint(path, ANOTHER, output)
    return path


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch, recording: Recording, another: Path) -> None:
    """What was recorded is; what is built from it may be lost."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def scratch(memory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


def build(tree: Tree | bytes, path: Path) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
    else:
        path.mkdir()
        for name, below in tree:
            build(below, path / name)


def check(crash: Crash, scratch: Path, another: Path) -> None:
    """What is found is whole, and the last or the one under way; whatever has a tag is whole; saving goes on."""
    tree, last = crash
    root = scratch / "root"
    build(tree, root)
    directory = CheckpointDirectory(root / BELOW)
    try:
        latest = directory.find()
        assert (None if latest is None else number_of(latest)) in last
        for saved in directory.tags():
            number_of(directory.find(saved.tag) or root)
        for tag in ("global_step3", "new"):
            partial = directory.begin(tag, run=RUN)
            shutil.copytree(another, partial, dirs_exist_ok=True)
            directory.commit(partial, tag, run=RUN)
            latest = directory.find()
            assert latest == directory.path / tag and number_of(latest) == ANOTHER
        assert directory.partials() == []
    finally:
        directory.close()
        shutil.rmtree(root)


@pytest.mark.one_of(2)
def test_what_a_power_cut_leaves_is_whole(recording: Recording, scratch: Path, another: Path) -> None:
    crashes = recording.crashes(recording.events)
    assert len(crashes) > 60
    for crash in crashes:
        check(crash, scratch, another)


def test_each_fsync_is_needed(recording: Recording, scratch: Path, another: Path) -> None:
    """Without it a power cut could lose a checkpoint, in one of the saves: so the test above would see that."""
    sound = recording.crashes(recording.events)
    kinds: dict[str, bool] = {}
    for kind, sync in fsyncs(recording):
        if not kinds.get(kind):
            crashes = recording.crashes([event for event in recording.events if event is not sync])
            kinds[kind] = any(fails(crash, scratch, another) for crash in crashes if crash not in sound)
    assert [kind for kind, needed in kinds.items() if not needed] == []
    assert set(kinds) == {
        *(".", "runs"),  # the directories above
        *(f"PARTIAL/{file.name}" for file in another.iterdir()),
        *("PARTIAL", "LATEST", "DIR 1", "DIR 2", "DIR 3"),
    }


def fsyncs(recording: Recording) -> Iterator[tuple[str, Synced]]:
    """Each fsync, and what it is for: a file of a save, its directory, or DIR, first, second, ... in it."""
    again = 0
    for event in recording.events:
        if isinstance(event, Returned):
            again = 0
        elif isinstance(event, Synced):
            kind = re.sub(r"\.latest\.partial-\w+", "LATEST", event.path)
            kind = (
                re.sub(r"\.\w+\.partial-\w+", "PARTIAL", kind).replace(str(BELOW), "DIR").removeprefix("DIR/")
            )
            if kind == "DIR":
                again += 1
                kind += f" {again}"
            yield kind, event


def fails(crash: Crash, scratch: Path, another: Path) -> bool:
    try:
        check(crash, scratch, another)
    except (AssertionError, CheckpointError):
        return True
    return False
