"""A save while training goes on holds the state of its call, to the bit, whoever comes first to what."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tiering
from tests.zero3.resuming import MIXED, ON_CPU, STREAMED, Left, Model, straight, train
from tiering.checkpoint.manifest import Manifest
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import Arena
from tiering.weights import tensor_file
from tiering.weights.tensor_file import WINDOW
from zero3.checkpoint import rank_share
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.saving import AHEAD, WRITING, Saver
from zero3.device import tiers
from zero3.engine.engine import Engine

Start = Callable[..., Engine]
PLACES = {"memory": {}, "cpu": ON_CPU, "nvme": STREAMED, "mixed": MIXED}


@pytest.fixture(autouse=True)
def in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a save has many of them."""
    monkeypatch.setattr(rank_share, "CHUNK", 2048)


def begin(start: Start, **options: Any) -> Engine:
    return start(Model(), **({"precision": "bf16", "accumulation": 1, "threshold": 40} | options))


@contextmanager
def holding(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[threading.Event]:
    """The saver stops before it has copied chunk ``after``, until the event is set."""
    let, finish, count = threading.Event(), Saver._finish, 0

    def hold(*args: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            assert let.wait(30)
        finish(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_finish", hold)
        try:
            yield let
        finally:
            let.set()


def loaded(start: Start, directory: Path, **options: Any) -> Left:
    torch.manual_seed(99)
    engine = begin(start, **options)
    engine.load_checkpoint(directory)
    outcome = Left.by(engine)
    engine.close()
    return outcome


def same_state(outcome: Left, other: Left) -> list[str]:
    differences = [name for name in outcome.tensors if not outcome.tensors[name].equal(other.tensors[name])]
    return differences + [
        name for name in ("options", "scale", "steps", "schedule") if outcome.rest[name] != other.rest[name]
    ]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state", ["fp32", "split+bf16"])
def test_what_is_saved_is_the_state_of_the_call_whatever_is_slow(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, state: str
) -> None:
    """Delays, drawn at random, in the saver's thread, its writes and the reads of both."""
    dice, finish = random.Random(place + state), Saver._finish
    options = {**PLACES[place], "state": state}
    plain = AioContext

    def slow(*args: Any) -> None:
        time.sleep(dice.choice([0, 0, 0, 0.002]))
        finish(*args)

    def faulty(**options: Any) -> AioContext:
        kinds: tuple[Literal["read", "write"], ...] = ("read", "write")
        faults = [Fault(kind, first=dice.randrange(1, 60), delay=0.01) for kind in kinds for _ in range(4)]
        return plain(fault=FaultPlan(tuple(faults)), **options)

    monkeypatch.setattr(Saver, "_finish", slow)
    monkeypatch.setattr(tensor_file, "AioContext", faulty)
    monkeypatch.setattr(tiers, "AioContext", faulty)
    torch.manual_seed(1)
    engine = begin(start, **options)
    torch.manual_seed(2)
    losses, expected = [], {}
    for step in range(6):
        losses += train(engine, range(step, step + 1))
        if step in (1, 3):
            expected[f"at{step}"] = Left.by(engine)
            saving = engine.save_checkpoint(tmp_path / "saved", f"at{step}", background=True)
    saving.wait()
    after = Left.by(engine, losses)
    engine.close()
    for tag, outcome in expected.items():
        other = begin(start, **options)
        other.load_checkpoint(tmp_path / "saved", tag)
        assert same_state(outcome, Left.by(other)) == [], tag
        other.close()
    assert after.differences(straight(lambda: begin(start, **options), 6)) == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", ["memory", "nvme"])
@pytest.mark.parametrize("after", [0, 9])
def test_a_step_waits_for_what_it_would_change_and_no_longer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, after: int
) -> None:
    engine = begin(start, **PLACES[place])
    train(engine, range(2))
    before = Left.by(engine)
    stepped, early = threading.Event(), list[bool]()
    with holding(monkeypatch, after) as let:
        saving = engine.save_checkpoint(tmp_path / "saved", background=True)
        loss = engine(torch.arange(24))  # forward and backward wait for nothing
        engine.backward(loss)
        watching = threading.Thread(target=lambda: (early.append(stepped.wait(0.3)), let.set()))
        watching.start()
        engine.step()
        stepped.set()
        watching.join()
    saving.wait()
    assert early == [False], "the step did not wait"
    assert saving.stalled > 0
    assert saving.seconds >= saving.stalled
    assert saving.nbytes == sum(
        file.stat().st_size for file in saving.path.iterdir() if file.name != "checkpoint.json"
    )
    assert same_state(before, loaded(start, tmp_path / "saved", **PLACES[place])) == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize("options", [{**MIXED}, {"state": "split"}, {"precision": "fp32"}], ids=str)
def test_what_changes_otherwise_waits_too(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Sets, edits in gathered(), a load, and another save."""
    engine = begin(start, **options)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved", "older")
    train(engine, range(1, 2))

    def edit() -> None:
        with tiering.gathered([engine.module.frozen, engine.module.scale], modify=True), torch.no_grad():
            engine.module.frozen.fill_(0.5)  # type: ignore[operator, union-attr]
            engine.module.scale.fill_(3.0)  # type: ignore[operator, union-attr]

    changes: dict[str, Callable[[], Any]] = {
        "parameter": lambda: engine.set_fp32_parameter("blocks.2.0.bias", torch.ones(96)),
        "state": lambda: engine.set_fp32_state("blocks.2.0.weight", "exp_avg", torch.ones(96, 32)),
        "edit": edit,
        "load": lambda: engine.load_checkpoint(tmp_path / "saved", "older"),
        "save": lambda: engine.save_checkpoint(tmp_path / "saved", "again"),
    }
    for name, change in changes.items():
        before = Left.by(engine)
        with holding(monkeypatch, 0) as let:
            saving = engine.save_checkpoint(tmp_path / "saved", name, background=True)
            timer = threading.Timer(0.1, let.set)
            timer.start()
            change()
            timer.join()
        saving.wait()
        other = begin(start, **options)
        other.load_checkpoint(tmp_path / "saved", name)
        assert same_state(before, Left.by(other)) == [], name
        other.close()


def test_buffers_options_and_counters_are_those_of_the_call(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begin(start)
    train(engine, range(1))
    mine = torch.zeros(3)
    before = Left.by(engine)
    with holding(monkeypatch, 0) as let:
        saving = engine.save_checkpoint(tmp_path, background=True, client_state={"mine": mine})
        mine.fill_(1)
        engine.optimizer.param_groups[0]["lr"] = 7.0
        engine.module.statistics.running_mean.fill_(9)  # type: ignore[operator, union-attr]
        let.set()
    saving.wait()
    engine.optimizer.param_groups[0]["lr"] = 8.0
    _, state = engine.load_checkpoint(tmp_path)
    assert state["mine"].equal(torch.zeros(3))
    assert same_state(before, Left.by(engine)) == []


def test_a_save_takes_its_own_windows_and_nothing_of_the_tiers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan promised stays the peak, and what is mapped beside it is what a save and a load say."""
    engine = begin(start, **STREAMED)
    mapped, plain = [], Arena.map

    def mapping(nbytes: int, name: str, *arguments: Any, **options: Any) -> Arena:
        mapped.append((name, nbytes))
        return plain(nbytes, name, *arguments, **options)

    monkeypatch.setattr(Arena, "map", mapping)
    for number in range(3):
        train(engine, range(number, number + 1))
        engine.save_checkpoint(tmp_path / "saved", background=number > 0)
    train(engine, range(3, 4))
    engine.load_checkpoint(tmp_path / "saved")
    for tier in engine.snapshot().tiers:
        assert tier.peak <= tier.budget, tier.name
    saved = [nbytes for name, nbytes in mapped if name == "checkpoint"]
    windows = AHEAD * WINDOW, (3 + 1 + WRITING) * WINDOW
    assert sorted(saved) == sorted(3 * windows)
    assert {name for name, _ in mapped} == {"checkpoint", "weights", "filling"}
    assert {nbytes for name, nbytes in mapped if name == "filling"} == {4 << 20}
    assert all(nbytes < 13 << 20 for name, nbytes in mapped if name == "weights")


def test_a_trace_shows_who_waits_for_a_save(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begin(start, **STREAMED)
    train(engine, range(1))
    engine.trace(tmp_path / "trace.json")
    train(engine, range(1, 2))
    with holding(monkeypatch, 5) as let:
        saving = engine.save_checkpoint(tmp_path / "saved", background=True)
        timer = threading.Timer(0.1, let.set)
        timer.start()
        train(engine, range(2, 4))
        timer.join()
    saving.wait()
    assert "checkpoint" in (tmp_path / "trace.json").read_text()


def test_what_a_checkpoint_says_of_itself_is_of_its_call(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is a step on when the commit record is written."""
    let, commit = threading.Event(), Checkpoints._commit

    def late(*args: Any) -> None:
        assert let.wait(30)
        commit(*args)

    monkeypatch.setattr(Checkpoints, "_commit", late)
    engine = begin(start)
    train(engine, range(2))
    counts = dict(engine.optimizer.steps)
    saving = engine.save_checkpoint(tmp_path, background=True)
    train(engine, range(2, 3))
    let.set()
    saving.wait()
    assert Manifest.read(saving.path).step == 2
    other = begin(start)
    other.load_checkpoint(tmp_path)
    assert other.optimizer.steps == counts != engine.optimizer.steps
