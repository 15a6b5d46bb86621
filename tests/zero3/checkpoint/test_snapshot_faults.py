"""Snapshots that fail, are cut off, or meet another run: what the next run finds, and what is left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoint.snapshotted import SAVE_AT, STEPS, Begin, snapshotted
from tests.zero3.resuming import MIXED, STREAMED, Left, straight, tokens, train
from tiering.checkpoint import directory
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.inspection import inspect
from tiering.checkpoint.manifest import MANIFEST, Manifest
from tiering.checkpoint.run_lock import LOCK
from tiering.errors import CheckpointError
from tiering.storage import swap_file
from zero3.checkpoint.opening import Opener
from zero3.checkpoint.snapshots import Snapshots
from zero3.engine.engine import Engine


def replaced(saved: Path) -> list[Any]:
    """The swap files that the snapshot in ``saved`` replaces, as its rank says."""
    content = json.loads((saved / "snapshot" / "rank-00001-of-00001.json").read_text())["content"]
    files: list[Any] = content["swap"]["replaced"]
    return files


def fail(*arguments: object, **options: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def fail_to_publish(engine: Engine, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(directory, "exchange", fail)
        failing.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.snapshot_state(saved)


def test_a_snapshot_replaces_the_files_of_another_run_and_none_of_its_own(
    begin: Begin, tmp_path: Path
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    for _ in range(3):
        engine.snapshot_state(saved)
        assert replaced(saved) == []
    engine.close()
    copied = begin(**STREAMED)()
    copied.load_checkpoint(saved)
    copied.snapshot_state(saved)
    assert len(replaced(saved)) == 1
    for _ in range(2):
        copied.snapshot_state(saved)
        assert replaced(saved) == []


@pytest.mark.parametrize("earlier", [False, True], ids=["the first", "a later one"])
def test_an_interrupt_behind_the_rename_keeps_the_snapshot(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    torch.manual_seed(1)
    engine = make()
    torch.manual_seed(2)
    losses = train(engine, range(1))
    if earlier:
        engine.snapshot_state(saved)
    losses += train(engine, range(1, SAVE_AT))
    commit = CheckpointDirectory.commit

    def commit_and_stop(*arguments: Any, **options: Any) -> Path:
        commit(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(CheckpointDirectory, "commit", commit_and_stop)
        with pytest.raises(KeyboardInterrupt):
            engine.snapshot_state(saved)
    train(engine, range(SAVE_AT, SAVE_AT + 2))
    engine.close()
    assert len([*nvme.iterdir()]) == 1
    resumed = make()
    resumed.load_checkpoint(saved)
    outcome = Left.by(resumed, losses + train(resumed, range(SAVE_AT, STEPS)))
    assert outcome.differences(straight(make, STEPS)) == []


def test_a_run_that_is_killed_before_its_first_snapshot_leaves_nothing_to_the_next_save(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    fail_to_publish(engine, saved, monkeypatch)
    # As by SIGKILL: nothing is cleared away.
    with monkeypatch.context() as killed:
        killed.setattr(Snapshots, "close", lambda _: None)
        engine.close()
    assert len([*nvme.iterdir()]) == 1
    other = make()
    other.save_checkpoint(saved, "ordinary")
    other.close()
    assert [*nvme.iterdir()] == []
    assert {path.name for path in saved.iterdir()} == {"ordinary", "latest"}


def test_after_a_failed_snapshot_the_next_one_leaves_nothing_of_it(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    for _ in range(2):
        fail_to_publish(engine, saved, monkeypatch)
    engine.snapshot_state(saved)
    assert {path.name for path in saved.iterdir()} == {"snapshot", "latest", LOCK}
    engine.close()
    assert len([*nvme.iterdir()]) == 1


def test_a_swap_file_may_have_grown_since(begin: Begin, tmp_path: Path, nvme: Path) -> None:
    """As it does for activations."""
    make, saved = begin(**STREAMED, verify=True), tmp_path / "saved"
    reference = straight(make, STEPS)
    engine, losses = snapshotted(make, saved)
    engine.close()
    (file,) = nvme.iterdir()
    os.truncate(file, file.stat().st_size + (3 << 20))
    assert inspect(saved / "snapshot").whole
    engine = make()
    engine.load_checkpoint(saved)
    assert Left.by(engine, losses + train(engine, range(SAVE_AT, STEPS))).differences(reference) == []


def test_without_hard_links_frozen_parameters_are_written_again(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    link = os.link

    def only_swap_files(*arguments: Any, **options: Any) -> None:
        if "dst_dir_fd" not in options:
            raise OSError(errno.EPERM, "Operation not permitted", str(arguments[1]))
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", only_swap_files)
    file = saved / "snapshot" / "weights-00001-of-00001.safetensors"
    inodes = []
    for _ in range(2):
        engine.snapshot_state(saved)
        inodes.append(file.stat().st_ino)
    assert inodes[0] != inodes[1]
    assert inspect(saved / "snapshot").whole


def test_a_name_that_was_not_on_the_disk_is_tried_again(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    with monkeypatch.context() as failing:
        failing.setattr(swap_file, "fsync", fail)
        with pytest.raises(CheckpointError, match="cannot hold a snapshot: Input/output error"):
            engine.snapshot_state(saved)
    engine.snapshot_state(saved)
    engine.close()
    assert len([*nvme.iterdir()]) == 1
    other = begin(**MIXED)()
    other.load_checkpoint(saved)


@pytest.mark.parametrize("snapshot_again", [False, True])
def test_edits_of_trained_parameters_and_gradients_change_no_frozen_ones(
    begin: Begin, tmp_path: Path, snapshot_again: bool
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    engine.snapshot_state(saved)
    file = saved / "snapshot" / "weights-00001-of-00001.safetensors"
    first, weight = file.stat().st_ino, engine.module.blocks[0][0].weight
    engine.backward(engine(tokens(0)))
    tiering.utils.safe_set_full_grad(weight, torch.ones(weight.shape))
    engine.step()
    with tiering.gathered([weight], modify=True):
        weight.data.mul_(2)
    if snapshot_again:
        engine.snapshot_state(saved)
        assert file.stat().st_ino == first
    else:
        engine.save_checkpoint(tmp_path / "behind", from_snapshot=True)


def is_locked(path: Path) -> bool:
    fd = os.open(path / LOCK, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@pytest.mark.parametrize(
    "order", [["snapshot", "save"], ["save", "snapshot"], ["save", "snapshot", "save"]], ids=str
)
def test_a_save_elsewhere_leaves_the_directory_of_the_snapshot_locked(
    begin: Begin, tmp_path: Path, order: list[str]
) -> None:
    engine, saved = begin(**MIXED)(), tmp_path / "saved"
    for number, what in enumerate(order):
        if what == "snapshot":
            engine.snapshot_state(saved)
        else:
            engine.save_checkpoint(saved, f"tag{number}")
    for number in range(2):
        engine.save_checkpoint(tmp_path / f"elsewhere{number}")
        assert is_locked(saved)
    assert not (tmp_path / "elsewhere0" / LOCK).exists()
    engine.close()
    assert not (saved / LOCK).exists()


def test_a_run_that_loads_a_checkpoint_of_another_one_goes_on_with_its_snapshots(
    begin: Begin, tmp_path: Path
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    other = make()
    other.save_checkpoint(tmp_path / "other")
    other.close()
    engine = make()
    engine.snapshot_state(saved)
    engine.load_checkpoint(tmp_path / "other")
    engine.snapshot_state(saved)
    assert inspect(saved / "snapshot").whole


def test_a_snapshot_that_is_replaced_while_it_is_opened_is_not_loaded(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run goes on from it and makes another one, in the same files, before this one can lock these."""
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine, losses = snapshotted(make, saved)
    engine.close()
    together: Callable[..., Any] = Opener._together
    waiting = ["open its files"]

    def go_on_elsewhere(opener: Opener, purpose: str, work: Callable[[], Any]) -> Any:
        if purpose in waiting:
            waiting.remove(purpose)
            other = make()
            other.load_checkpoint(saved)
            losses.extend(train(other, range(SAVE_AT, SAVE_AT + 1)))
            other.snapshot_state(saved)
            other.close()
        return together(opener, purpose, work)

    monkeypatch.setattr(Opener, "_together", go_on_elsewhere)
    engine = make()
    engine.load_checkpoint(saved)
    assert engine.global_steps == SAVE_AT + 1
    outcome = Left.by(engine, losses + train(engine, range(SAVE_AT + 1, STEPS)))
    assert outcome.differences(straight(make, STEPS)) == []


def test_what_was_replaced_before_its_files_were_locked_is_looked_for_again(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all files of the one that was found can still be opened: here only the record is another one."""
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine, _ = snapshotted(make, saved)
    engine.close()
    together: Callable[..., Any] = Opener._together

    opened = []

    def record_another(opener: Opener, purpose: str, work: Callable[[], Any]) -> Any:
        if purpose == "open the checkpoint":
            opened.append(Manifest.read(saved / "snapshot").save)
        if purpose == "look whether it is still there":
            other = replace(Manifest.read(saved / "snapshot"), save="another")
            (saved / "snapshot" / MANIFEST).unlink()
            other.write(saved / "snapshot")
        return together(opener, purpose, work)

    monkeypatch.setattr(Opener, "_together", record_another)
    make().load_checkpoint(saved)
    assert opened[1:] == ["another"]
