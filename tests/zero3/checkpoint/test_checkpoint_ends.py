"""Ctrl-C, a fork and other ways out of a save or a load: the last checkpoint is whole, a torn engine says so."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoints import SETTINGS, Start, begin, entries, undisturbed
from tests.zero3.inside import saver_of
from tests.zero3.resuming import MIXED, STREAMED, Left, Model, tokens, train
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import EngineStateError
from zero3.building.fill import Fill
from zero3.checkpoint.saving import Saver
from zero3.optimizer.tile_batch import TileBatch


@contextmanager
def interrupting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> Iterator[None]:
    """Ctrl-C when ``owner.name`` is called for the ``number``-th time."""
    calls, method = [], getattr(owner, name)

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return method(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        yield
    assert len(calls) >= number


def test_ctrl_c_in_a_save_or_its_wait_leaves_the_last_checkpoint_and_a_whole_engine(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    engine = begin(start, **STREAMED)
    torch.manual_seed(2)
    engine.save_checkpoint(tmp_path / "saved", "first")
    finish = threading.Event()
    copy = Saver._copy

    def hold(*args: Any) -> None:
        finish.wait(30)
        copy(*args)

    for background in (False, True):
        monkeypatch.setattr(Saver, "_copy", hold)
        finish.clear()
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        letting = threading.Timer(0.4, finish.set)
        timer.start(), letting.start()
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path / "saved", "second", background=background).wait()
        assert finish.is_set(), "it was not waited for"
        timer.join(), letting.join()
        assert entries(tmp_path / "saved") == ["first", "latest"]
    monkeypatch.setattr(Saver, "_copy", copy)
    assert Left.by(engine, train(engine, range(3))).differences(undisturbed(start, 3, **STREAMED)) == []
    engine.save_checkpoint(tmp_path / "saved", "third")


def test_ctrl_c_in_a_load_leaves_an_engine_that_loads_another_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begin(start, **MIXED)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    expected = Left.by(engine)
    for number in (1, 3):
        with interrupting(monkeypatch, Fill, "_own", number), pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(tmp_path)
        for call in (
            lambda: engine(tokens(0)),
            engine.state_dict,
            lambda: engine.save_checkpoint(tmp_path, "torn"),
        ):
            with pytest.raises(EngineStateError, match="load_checkpoint did not end"):
                call()
        engine.load_checkpoint(tmp_path)
        assert Left.by(engine).differences(expected) == []
    with interrupting(monkeypatch, Fill, "_own", 2), pytest.raises(KeyboardInterrupt):
        engine.load_checkpoint(tmp_path)
    engine.close()
    with pytest.raises(EngineStateError, match=r"after close\(\)"):
        engine.load_checkpoint(tmp_path)


def test_a_step_that_was_ended_half_way_is_not_mended_by_a_load(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step has left over would be used by the next one."""
    engine = begin(start)
    engine.save_checkpoint(tmp_path)
    monkeypatch.setattr(TileBatch, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(engine, range(1))
    with pytest.raises(EngineStateError, match="initialize the model again from a checkpoint"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("how", ["close", "drop", "exception"])
def test_however_an_engine_ends_a_save_in_the_background_does(
    start: Start, tmp_path: Path, nvme: Path, how: str
) -> None:
    from tests.zero3.conftest import config

    engine = tiering.initialize(model=Model(), config=config(nvme, **SETTINGS, **STREAMED)).engine
    train(engine, range(1))
    if how == "close":
        saving = engine.save_checkpoint(tmp_path / "saved", background=True)
        engine.close()
        assert saving.done
    elif how == "exception":
        with pytest.raises(ZeroDivisionError), engine:  # noqa: PT012 (a user's loop)
            engine.save_checkpoint(tmp_path / "saved", background=True)
            engine.backward(engine(tokens(1)))
            raise ZeroDivisionError
    else:
        engine.save_checkpoint(tmp_path / "saved", background=True)
        thread = saver_of(engine)
        del engine
        gc.collect()
        thread.join()
        del thread
        with pytest.warns(ResourceWarning, match=r"dropped without close\(\)"):
            gc.collect()
    assert entries(tmp_path / "saved") == ["global_step1", "latest"]
    begin(start).load_checkpoint(tmp_path / "saved")


def test_a_fork_during_a_save_takes_nothing_with_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begin(start, **STREAMED)
    forked, copy = threading.Event(), Saver._copy

    def hold(*args: Any) -> None:
        forked.wait(30)
        copy(*args)

    monkeypatch.setattr(Saver, "_copy", hold)
    saving = engine.save_checkpoint(tmp_path, background=True)
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    forked.set()
    saving.wait()
    assert open_checkpoint(saving.path).manifest.step == 0
