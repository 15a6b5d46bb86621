"""Loads while another run saves and prunes in the same directory: each takes a checkpoint that is whole."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero3.checkpoint.opening
from tests.zero3.checkpoints import Start, begin
from tests.zero3.resuming import MIXED, Left, train
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.errors import CheckpointError
from zero3.checkpoint.restore import Restore
from zero3.engine.engine import Engine


def once_before(owner: Any, name: str, happens: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    """Let something happen before the first call of ``owner.name``."""
    original, over = getattr(owner, name), threading.Event()

    def called(*args: Any, **kwargs: Any) -> Any:
        if not over.is_set():
            over.set()
            happens()
        return original(*args, **kwargs)

    patch.setattr(owner, name, called)


def step_and_save(engine: Engine, directory: Path, tag: str | None = None) -> None:
    train(engine, range(1))
    engine.save_checkpoint(directory, tag, keep=1)


def differences(engine: Engine, other: Left) -> list[str]:
    """But for the norm of the last gradients, which a load does not bring back."""
    return [name for name in Left.by(engine).differences(other) if name != "norm"]


@pytest.fixture
def saving(start: Start, tmp_path: Path) -> Engine:
    """Somebody else's engine, whose first checkpoint is there."""
    engine = begin(start)
    step_and_save(engine, tmp_path)
    return engine


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (CheckpointDirectory, "_place"),
        (zero3.checkpoint.opening, "open_checkpoint"),
        (zero3.checkpoint.opening, "Restore"),
    ],
    ids=["found", "opened", "matched"],
)
def test_a_checkpoint_that_is_pruned_before_it_is_open_gives_way_to_the_next(
    start: Start, saving: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    engine = begin(start)
    once_before(owner, name, lambda: step_and_save(saving, tmp_path), monkeypatch)
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step2")
    assert engine.global_steps == 2
    assert differences(engine, Left.by(saving)) == []


@pytest.mark.parametrize("place", [{}, MIXED], ids=["memory", "mixed"])
def test_a_checkpoint_that_is_pruned_once_it_is_open_is_read_to_its_end(
    start: Start, saving: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: dict[str, Any]
) -> None:
    engine, expected = begin(start, **place), Left.by(saving)
    once_before(Restore, "run", lambda: step_and_save(saving, tmp_path), monkeypatch)
    engine.load_checkpoint(tmp_path)
    assert not (tmp_path / "global_step1").exists()
    assert engine.global_steps == 1
    assert differences(engine, expected) == []


def test_a_tag_that_is_saved_again_before_it_is_open(
    start: Start, saving: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_and_save(saving, tmp_path, "mine")
    engine = begin(start)
    once_before(
        zero3.checkpoint.opening, "rank_state", lambda: step_and_save(saving, tmp_path, "mine"), monkeypatch
    )
    engine.load_checkpoint(tmp_path, "mine")
    assert engine.global_steps == 3
    assert differences(engine, Left.by(saving)) == []


def test_a_file_that_is_gone_for_good_is_named_with_a_remedy(
    start: Start, saving: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "global_step1" / "weights-00001-of-00001.safetensors"
    engine = begin(start)
    once_before(zero3.checkpoint.opening, "Restore", file.unlink, monkeypatch)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    message = f"{file}: it does not exist; load another checkpoint (tag=)"
    assert str(caught.value) == f"[TIER-CHECKPOINT] {message}"
    shutil.rmtree(file.parent)
    with pytest.raises(
        CheckpointError, match="latest names 'global_step1', but this checkpoint does not exist"
    ):
        engine.load_checkpoint(tmp_path)


def test_loads_beside_saves_that_keep_one(start: Start, saving: Engine, tmp_path: Path) -> None:
    """Both as fast as they can."""
    engine, over = begin(start), threading.Event()
    steps: list[int] = []
    failed: list[Exception] = []

    def load() -> None:
        while not over.is_set():
            try:
                engine.load_checkpoint(tmp_path)
            except Exception as error:
                failed.append(error)
                return
            steps.append(engine.global_steps)

    thread = threading.Thread(target=load)
    thread.start()
    for _ in range(20):
        step_and_save(saving, tmp_path)
    over.set()
    thread.join()
    assert failed == []
    assert steps == sorted(steps)
    assert len(set(steps)) > 1
