"""Snapshots: state that stays in the swap files, from which another run goes on bit for bit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoint.killed_snapshots import AS_CONFIGURED
from tests.zero3.checkpoint.snapshotted import FORMATS, SAVE_AT, STEPS, Begin, flip_bit, snapshotted
from tests.zero3.resuming import MIXED, ON_CPU, STREAMED, Left, after_snapshot, straight, train
from tiering.checkpoint import directory
from tiering.checkpoint.conversion import to_weights
from tiering.checkpoint.inspection import inspect
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError, EngineStateError, PlacementError, SwapError
from tiering.storage.aio import Fault
from tiering.weights.files import open_weights, same_bytes

# Without swap space for a checkpoint there is none for a snapshot.
IN_MEMORY: dict[str, Any] = {"offload_param": "nvme", "offload_optimizer": "nvme"}
PLACEMENTS = {"memory": IN_MEMORY, "nvme": STREAMED, "mixed": MIXED}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("state", FORMATS)
def test_a_run_goes_on_from_a_snapshot(
    begin: Begin, tmp_path: Path, nvme: Path, state: str, placement: str
) -> None:
    make = begin(**FORMATS[state], **PLACEMENTS[placement])
    reference = straight(make, STEPS)
    outcome = after_snapshot(make, STEPS, SAVE_AT, tmp_path / "saved")
    assert outcome.differences(reference) == []
    # It has adopted the swap file.
    assert len([*nvme.iterdir()]) == 1


def test_frozen_parameters_are_written_once(begin: Begin, tmp_path: Path) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    file = saved / "snapshot" / "weights-00001-of-00001.safetensors"

    def snapshot() -> int:
        assert engine.snapshot_state(saved) == file.parent
        return file.stat().st_ino

    first = snapshot()
    train(engine, range(1))
    assert snapshot() == first
    with tiering.gathered([engine.module.frozen], modify=True):
        engine.module.frozen.data.fill_(3)
    changed = snapshot()
    assert changed != first
    engine.close()
    engine = make()
    engine.load_checkpoint(saved)
    with tiering.gathered([engine.module.frozen]):
        assert engine.module.frozen.eq(3).all()
    assert snapshot() == changed
    engine.close()
    shutil.copytree(file.parent, saved / "copy")
    engine = make()
    engine.load_checkpoint(saved, "copy")
    assert snapshot() != changed
    assert inspect(file.parent).whole
    engine.snapshot_state(saved, exclude_frozen_parameters=True)
    assert not file.exists()
    snapshot()
    assert file.exists()


@pytest.mark.parametrize("state", ["fp32", "split"])
def test_a_run_goes_on_elsewhere(begin: Begin, tmp_path: Path, state: str) -> None:
    make = begin(**FORMATS[state], **MIXED)
    elsewhere = begin(**FORMATS[state], snapshots=False, **ON_CPU)
    reference = straight(elsewhere, STEPS)
    outcome = after_snapshot(make, STEPS, SAVE_AT, tmp_path / "saved", elsewhere=elsewhere)
    assert outcome.differences(reference) == []


def test_files_stay_with_their_snapshot_and_no_longer(
    begin: Begin, tmp_path: Path, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    train(engine, range(1))
    engine.close()
    assert not [*nvme.iterdir()]
    engine = make()
    train(engine, range(1))
    engine.snapshot_state(saved)
    (first,) = nvme.iterdir()
    other = make()
    with pytest.raises(CheckpointError, match="has not ended uses it; close the engine that wrote it"):
        other.load_checkpoint(saved)
    engine.close()
    assert [*nvme.iterdir()] == [first]
    other.load_checkpoint(saved)
    assert [*nvme.iterdir()] == [first]
    other.snapshot_state(saved)
    assert [*nvme.iterdir()] == [first]
    assert "is not removed" not in caplog.text
    other.close()
    third = make()
    third.load_checkpoint(saved)
    assert third.global_steps == 1
    third.snapshot_state(saved)
    with pytest.raises(ConfigError, match="this engine has its snapshot in"):
        third.snapshot_state(tmp_path / "elsewhere")


def test_remains_of_a_crash_may_name_the_files_of_the_snapshot(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    path = engine.snapshot_state(saved)
    engine.close()
    # Killed before it was published: the second snapshot of a run is in the same swap file as the first.
    shutil.copytree(path, saved / ".snapshot.partial-00000000")
    (first,) = nvme.iterdir()
    # It copies the content, so that no lock keeps the swap file from being removed.
    other = begin(**STREAMED)()
    other.load_checkpoint(saved)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(directory, "exchange", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            other.snapshot_state(saved)
    other.close()
    assert [*nvme.iterdir()] == [first]
    assert [each.name for each in saved.iterdir() if "partial" in each.name] == []
    make().load_checkpoint(saved)


def test_a_snapshot_that_fails_changes_nothing(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(directory, "exchange", fail)
        failing.setattr(Path, "rename", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            engine.snapshot_state(saved)
    engine.close()
    assert not [*nvme.iterdir()]
    engine = make()
    torch.manual_seed(2)
    losses = train(engine, range(SAVE_AT))
    engine.snapshot_state(saved)
    for number in range(SAVE_AT, SAVE_AT + 2):
        train(engine, range(number, number + 1))
        with monkeypatch.context() as failing:
            failing.setattr(directory, "exchange", fail)
            with pytest.raises(CheckpointError, match="Input/output error"):
                engine.snapshot_state(saved)
    engine.close()
    resumed = make()
    resumed.load_checkpoint(saved)
    outcome = Left.by(resumed, losses + train(resumed, range(SAVE_AT, STEPS)))
    resumed.close()
    assert outcome.differences(straight(make, STEPS)) == []


def test_content_that_was_not_written_is_in_no_snapshot(
    begin: Begin, tmp_path: Path, plan_fault: Callable[..., None]
) -> None:
    plan_fault(Fault("write", first=49, error=errno.EIO))
    saved, engine = tmp_path / "saved", begin(**STREAMED)()
    plan_fault()
    number = 0
    with pytest.raises(CheckpointError, match=r"the snapshot was not saved: .* EIO"):  # noqa: PT012 (the plan decides which step's write fails)
        for number in range(STEPS):
            train(engine, range(number, number + 1))
            engine.snapshot_state(saved)
    with contextlib.suppress(SwapError):
        engine.close()
    resumed = begin(**STREAMED)()
    resumed.load_checkpoint(saved)
    assert resumed.global_steps == number > 0


def test_a_snapshot_that_is_published_late_is_kept(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    torch.manual_seed(2)
    losses = train(engine, range(1))
    engine.snapshot_state(saved)
    losses += train(engine, range(1, SAVE_AT))
    real, calls = directory.fsync, []

    def fail(path: Path) -> None:
        # The last one is that of the directory, after the rename.
        calls.append(path)
        if calls.count(saved) == 2:
            raise OSError(5, "Input/output error")
        real(path)

    with monkeypatch.context() as failing:
        failing.setattr(directory, "fsync", fail)
        with pytest.raises(CheckpointError, match="has the complete checkpoint 'snapshot'"):
            engine.snapshot_state(saved)
    train(engine, range(SAVE_AT, SAVE_AT + 2))
    engine.close()
    resumed = make()
    resumed.load_checkpoint(saved)
    outcome = Left.by(resumed, losses + train(resumed, range(SAVE_AT, STEPS)))
    resumed.close()
    assert outcome.differences(straight(make, STEPS)) == []


def test_what_is_refused(begin: Begin, tmp_path: Path) -> None:
    engine = begin(**MIXED, snapshots=False)()
    with pytest.raises(ConfigError, match=r"set tiering\.snapshots to true, or call save_checkpoint"):
        engine.snapshot_state(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"true without a directory: set nvme_path"):
        begin(**ON_CPU)()
    with pytest.raises(PlacementError, match="snapshots"):
        begin(**MIXED, nvme_budget="300KiB")()
    engine = begin(**MIXED)()
    engine.backward(engine(torch.arange(24)))
    with pytest.raises(EngineStateError, match="snapshot_state"):
        engine.snapshot_state(tmp_path / "saved")


def test_a_damaged_snapshot_is_refused(begin: Begin, tmp_path: Path, nvme: Path) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    path = engine.snapshot_state(saved)
    found = inspect(path)
    assert found.whole and "swap files without checksums" in found.caveat
    engine.close()
    (file,) = nvme.iterdir()
    nbytes = file.stat().st_size
    other = make()
    os.truncate(file, nbytes // 2)
    with pytest.raises(CheckpointError, match="another file than that of the snapshot"):
        other.load_checkpoint(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        other.load_checkpoint(saved)
    text = (path / "rank-00001-of-00001.json").read_text()
    (path / "rank-00001-of-00001.json").write_text(text.replace('"first": 0', '"first": 1', 1))
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        other.load_checkpoint(saved)


@pytest.mark.parametrize("state", ["fp32", "split"])
def test_a_snapshot_is_converted(begin: Begin, tmp_path: Path, state: str) -> None:
    """To the same weights as a checkpoint of the same step, also after further steps of the run."""
    engine = begin(**FORMATS[state], **MIXED)()
    train(engine, range(SAVE_AT))
    snapshot = engine.snapshot_state(tmp_path / "saved")
    checkpoint = Path(engine.save_checkpoint(tmp_path / "saved").path)
    train(engine, range(2))
    with pytest.raises(CheckpointError, match="has not ended uses it"):
        to_weights(open_checkpoint(snapshot), tmp_path / "early")
    engine.close()
    converted = [tmp_path / "of snapshot", tmp_path / "of checkpoint"]
    for source, into in zip((snapshot, checkpoint), converted, strict=True):
        assert not to_weights(open_checkpoint(source), into).excluded
    weights = [open_weights(into) for into in converted]
    assert (
        weights[0].tensors.keys()
        == weights[1].tensors.keys()
        > {"frozen", "table.weight", "scale", "nothing"}
    )
    for name, tensor in weights[0].tensors.items():
        assert same_bytes(tensor, weights[1].tensors[name]), name


@pytest.mark.parametrize("kind", ["weights", "exp_avg"])
def test_a_flipped_bit_in_a_swap_file_is_found(begin: Begin, tmp_path: Path, kind: str) -> None:
    make, saved = begin(**STREAMED, verify=True), tmp_path / "saved"
    reference = straight(make, STEPS)
    engine, losses = snapshotted(make, saved)
    # Other pages of the file change, which the snapshot does not have.
    train(engine, range(1))
    assert "swap files were not checked" in inspect(saved / "snapshot").caveat
    engine.close()
    found = inspect(saved / "snapshot")
    assert (found.whole, found.caveat) == (True, "")
    engine = make()
    engine.load_checkpoint(saved)
    assert Left.by(engine, losses + train(engine, range(SAVE_AT, STEPS))).differences(reference) == []
    engine.close()
    name = "blocks.1.0.weight"
    flip_bit(saved, kind, name)
    (damage,) = inspect(saved / "snapshot").damage
    assert damage.problem == "CRC32C mismatch" and name in damage.names
    # A copy is compared before training.
    engine = begin(**STREAMED)()
    with pytest.raises(
        CheckpointError, match=rf"'{name}' is damaged: CRC32C mismatch.*load another checkpoint"
    ):
        engine.load_checkpoint(saved)
    # Adopted pages are compared when they are read.
    engine = make()
    engine.load_checkpoint(saved)
    with pytest.raises(SwapError, match=f"{name}.*EBADMSG"):
        train(engine, range(1))
    with contextlib.suppress(SwapError):
        engine.close()


def ran(program: str, *arguments: str) -> dict[str, int]:
    """What a program beside this file prints last."""
    command = [sys.executable, "-m", f"tests.zero3.checkpoint.{program}", *arguments]
    environment = {**os.environ, "TIERING_DEVICE": "cpu"}
    # What it writes to stderr is shown with a failed test.
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    outcome: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return outcome


@pytest.mark.parametrize(
    ("state", "kills"),
    [("split", 6), *(pytest.param(state, 170, marks=pytest.mark.slow) for state in AS_CONFIGURED)],
)
def test_a_run_that_is_killed_goes_on_from_its_last_snapshot(tmp_path: Path, state: str, kills: int) -> None:
    outcome = ran("killed_snapshots", str(tmp_path), state, "--kills", str(kills))
    assert not outcome["failed"]
    # The last life has one swap file, and removes those of all before it.
    assert (outcome["killed"], outcome["files"]) == (kills, 1)


@pytest.mark.slow
@pytest.mark.parametrize("synced", [True, False])
def test_a_power_cut_leaves_a_snapshot(tmp_path: Path, synced: bool) -> None:
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("root and mkfs.ext4 are needed to mount a file system")
    outcome = ran("cut_snapshots", str(tmp_path), *([] if synced else ["--not-synced"]))
    if synced:
        found = {f"{which}, {how}" for which in ("last", "under way") for how in ("adopted", "copied")}
        # A snapshot under way is that of the run whose settings the next one has.
        assert outcome.keys() == {"none", *found} - {"under way, copied"}
    else:
        # So the test sees what it is meant to see.
        assert outcome["lost"]
