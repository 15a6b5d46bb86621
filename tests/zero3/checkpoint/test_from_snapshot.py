"""Checkpoints of the last snapshot: saved behind training, from the pages that the snapshot keeps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoint.snapshotted import (
    FORMATS,
    SAVE_AT,
    STEPS,
    Begin,
    assert_same_checkpoints,
    flip_bit,
    snapshotted,
)
from tests.zero3.resuming import MIXED, ON_CPU, STREAMED, Left, straight, train
from tiering.checkpoint.manifest import Manifest
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from zero3.checkpoint import rank_share
from zero3.checkpoint.saving import Saver

# Without swap space for a checkpoint there is none for a snapshot.
IN_MEMORY: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme"}
PLACEMENTS = {"memory": IN_MEMORY, "nvme": STREAMED, "mixed": MIXED}


@pytest.fixture(autouse=True)
def in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a save has many of them."""
    monkeypatch.setattr(rank_share, "CHUNK", 2048)


class Held:
    """The saver stops before its first chunk until ``let`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let = threading.Event()
        copy = Saver._copy

        def hold(*args: Any) -> None:
            assert self.let.wait(60)
            copy(*args)

        monkeypatch.setattr(Saver, "_copy", hold)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("state", FORMATS)
def test_a_checkpoint_behind_training_is_that_of_the_snapshots_step(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, placement: str
) -> None:
    make, saved = begin(**FORMATS[state], **PLACEMENTS[placement]), tmp_path / "saved"
    engine, losses = snapshotted(make, saved)
    expected = engine.save_checkpoint(saved, "expected").path
    held = Held(monkeypatch)
    saving = engine.save_checkpoint(saved, background=True, from_snapshot=True)
    # Two steps are over before the saver has read anything.
    losses += train(engine, range(SAVE_AT, SAVE_AT + 2))
    assert not saving.done
    held.let.set()
    losses += train(engine, range(SAVE_AT + 2, STEPS))
    saving.wait()
    assert saving.path == saved / f"global_step{SAVE_AT}"
    assert_same_checkpoints(saving.path, expected)
    assert Left.by(engine, losses).differences(straight(make, STEPS)) == []


@pytest.mark.parametrize("state", ["fp32", "split"])
def test_it_is_loaded_elsewhere(begin: Begin, tmp_path: Path, state: str) -> None:
    make, saved = begin(**FORMATS[state], **MIXED), tmp_path / "saved"
    elsewhere = begin(**FORMATS[state], snapshots=False, **ON_CPU)
    engine, losses = snapshotted(make, saved)
    train(engine, range(2))
    path = engine.save_checkpoint(tmp_path / "kept", from_snapshot=True).path
    engine.close()
    torch.manual_seed(99)
    resumed = elsewhere()
    assert resumed.load_checkpoint(tmp_path / "kept") == (str(path), {})
    outcome = Left.by(resumed, losses + train(resumed, range(SAVE_AT, STEPS)))
    assert outcome.differences(straight(elsewhere, STEPS)) == []


def test_chunks_need_not_begin_with_a_page(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_share, "CHUNK", 1000)
    engine, _ = snapshotted(begin(**IN_MEMORY, precision="bf16", state="split"), tmp_path)
    expected = engine.save_checkpoint(tmp_path, "expected").path
    train(engine, range(2))
    assert_same_checkpoints(engine.save_checkpoint(tmp_path, from_snapshot=True).path, expected)


def test_the_next_snapshot_waits_for_the_saver(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = snapshotted(begin(**MIXED), tmp_path)
    expected = engine.save_checkpoint(tmp_path, "expected").path
    held = Held(monkeypatch)
    saving = engine.save_checkpoint(tmp_path, background=True, from_snapshot=True)
    train(engine, range(1))
    wait_for_end, seen = Saver.wait_for_end, list[bool]()

    def wait(saver: Saver, within: float) -> bool:
        seen.append(saving.done)
        held.let.set()
        return wait_for_end(saver, within)

    monkeypatch.setattr(Saver, "wait_for_end", wait)
    engine.snapshot_state(tmp_path)
    assert saving.done and seen[0] is False
    # These steps overwrite the pages of the snapshot before.
    train(engine, range(2))
    assert_same_checkpoints(saving.path, expected)
    assert engine.save_checkpoint(tmp_path, from_snapshot=True).tag == f"global_step{SAVE_AT + 1}"


def test_a_read_that_fails_ends_the_save_and_not_the_run(begin: Begin, tmp_path: Path) -> None:
    make, saved = begin(**STREAMED, verify=True), tmp_path / "saved"
    engine, losses = snapshotted(make, saved)
    # Afterwards, no step reads the pages of the snapshot.
    losses += train(engine, range(SAVE_AT, SAVE_AT + 1))
    flip_bit(saved, "exp_avg", "blocks.1.0.weight")
    saving = engine.save_checkpoint(saved, background=True, from_snapshot=True)
    losses += train(engine, range(SAVE_AT + 1, SAVE_AT + 2))
    with pytest.raises(CheckpointError, match=r"blocks.1.0.weight.*EBADMSG"):
        saving.wait()
    assert [each.name for each in saved.iterdir() if each.is_dir()] == ["snapshot"]
    engine.snapshot_state(saved)
    path = engine.save_checkpoint(saved, from_snapshot=True).path
    assert Manifest.read(path).step == SAVE_AT + 2
    losses += train(engine, range(SAVE_AT + 2, STEPS))
    assert Left.by(engine, losses).differences(straight(make, STEPS)) == []


def test_an_adopted_snapshot_is_saved(begin: Begin, tmp_path: Path) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    train(engine, range(SAVE_AT))
    engine.snapshot_state(saved, {"at": SAVE_AT})
    expected = engine.save_checkpoint(saved, "expected", {"at": SAVE_AT}).path
    engine.close()
    engine = make()
    engine.load_checkpoint(saved, "snapshot")
    train(engine, range(2))
    assert_same_checkpoints(engine.save_checkpoint(saved, "again", from_snapshot=True).path, expected)


def test_frozen_parameters_are_as_in_the_snapshot(begin: Begin, tmp_path: Path) -> None:
    engine, _ = snapshotted(begin(**MIXED), tmp_path)
    without = engine.save_checkpoint(tmp_path, "without", exclude_frozen_parameters=True).path
    train(engine, range(1))
    path = engine.save_checkpoint(tmp_path, from_snapshot=True, exclude_frozen_parameters=True).path
    assert_same_checkpoints(path, without)
    with tiering.gathered([engine.module.frozen], modify=True):
        engine.module.frozen.data.fill_(3)
    with pytest.raises(CheckpointError, match="parameters were changed since the snapshot"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
    engine.snapshot_state(tmp_path)
    engine.save_checkpoint(tmp_path, from_snapshot=True)
    engine.snapshot_state(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(ConfigError, match="has no frozen parameters"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
    assert Manifest.read(
        engine.save_checkpoint(tmp_path, "left out", from_snapshot=True, exclude_frozen_parameters=True).path
    ).excluded.keys() == {"frozen"}


def test_an_edit_waits_until_the_saver_has_read_frozen_parameters(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = snapshotted(begin(**MIXED), tmp_path)
    expected = engine.save_checkpoint(tmp_path, "expected").path
    held = Held(monkeypatch)
    saving = engine.save_checkpoint(tmp_path, background=True, from_snapshot=True)
    let_change = Saver.let_change

    def let(*args: Any) -> bool:
        held.let.set()
        return let_change(*args)

    monkeypatch.setattr(Saver, "let_change", let)
    with tiering.gathered([engine.module.frozen], modify=True):
        engine.module.frozen.data.fill_(3)
    saving.wait()
    assert_same_checkpoints(saving.path, expected)


def test_what_is_refused(begin: Begin, tmp_path: Path) -> None:
    engine = begin(**MIXED, snapshots=False)()
    with pytest.raises(ConfigError, match=r"set tiering\.snapshots to true"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
    engine = begin(**MIXED)()
    with pytest.raises(EngineStateError, match="before a snapshot: call snapshot_state first"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
    engine.snapshot_state(tmp_path)
    with pytest.raises(ConfigError, match="saves the client_state that snapshot_state got"):
        engine.save_checkpoint(tmp_path, client_state={"at": 1}, from_snapshot=True)
    begin(**MIXED)().save_checkpoint(tmp_path / "other")
    (tmp_path / "snapshot").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="snapshot"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
    (tmp_path / "other" / "global_step0").rename(tmp_path / "snapshot")
    with pytest.raises(CheckpointError, match="not the last snapshot of this run"):
        engine.save_checkpoint(tmp_path, from_snapshot=True)
