"""Adoption: a run with the plan of the run that made a snapshot goes on in its swap files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tiering
from tests.zero3.checkpoint.snapshotted import FORMATS, SAVE_AT, STEPS, Begin, locked, snapshotted
from tests.zero3.conftest import config
from tests.zero3.resuming import MIXED, STREAMED, WIDTH, Left, Model, straight, tokens, train
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError, EngineStateError, SwapSpaceError
from tiering.storage import slabs, striping
from tiering.storage.arena import PAGE
from tiering.storage.swap_space import SwapSpace
from tiering.weights.files import StoredTensor
from tiering.weights.reader import _Window
from zero3.checkpoint.adoption import Adoption
from zero3.engine.engine import Engine
from zero3.ranks.joining import World


class Moved:
    """Counts the bytes that a load reads from swap files, and writes to swap space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = self.written = 0
        fill, swap_out = _Window.fill, SwapSpace.swap_out

        def filling(
            window: Any, aio: Any, file: int, tensor: StoredTensor, start: int, end: int, *rest: Any
        ) -> None:
            self.read += (end - start) * (tensor.file.suffix == ".swap")
            fill(window, aio, file, tensor, start, end, *rest)

        def writing(space: SwapSpace, extent: Any, buffer: Any, **options: Any) -> Any:
            self.written += options.get("nbytes") or buffer.nbytes
            return swap_out(space, extent, buffer, **options)

        monkeypatch.setattr(_Window, "fill", filling)
        monkeypatch.setattr(SwapSpace, "swap_out", writing)


def resumed_by(
    make: Callable[[], Engine], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, Moved]:
    engine = make()
    with monkeypatch.context() as counting:
        moved = Moved(counting)
        engine.load_checkpoint(saved)
    return engine, moved


@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_a_resume_with_the_same_plan_adopts_the_swap_files(
    begin: Begin, tmp_path: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    make, saved = begin(**FORMATS[state], **STREAMED), tmp_path / "saved"
    reference = straight(make, STEPS)
    engine, losses = snapshotted(make, saved)
    engine.close()
    (file,) = nvme.iterdir()
    # The first of these is killed before its first snapshot: the pages that it writes are not those of the snapshot.
    for steps in (range(SAVE_AT, SAVE_AT + 2), range(SAVE_AT, STEPS)):
        engine, moved = resumed_by(make, saved, monkeypatch)
        parts = engine._checkpoints._parts
        own = [
            group.home.extent.nbytes
            for group in parts.groups
            if group.home.extent and not group.home.in_snapshots
        ]
        trained = [param.numel() for param in engine.module.parameters() if param.requires_grad]
        # Frozen parameters come from a file. Those of two bytes are rounded masters.
        assert moved.written == sum(own)
        masters = sum(trained) if state == "bf16" else 0
        # Of small parameters, which are in memory, all state.
        assert 4 * masters <= moved.read <= 4 * masters + 12 * sum(numel for numel in trained if numel <= 40)
        left = Left.by(engine, losses + train(engine, steps))
        engine.close()
        assert [*nvme.iterdir()] == [file]
    assert left.differences(reference) == []


@pytest.mark.parametrize("state", ["fp32", "split"])
def test_a_resume_that_is_announced_writes_no_first_values(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    make, saved = begin(**FORMATS[state], **STREAMED), tmp_path / "saved"
    reference = straight(make, STEPS)
    # There is no checkpoint yet.
    engine, losses = snapshotted(partial(make, resume=saved), saved)
    engine.save_checkpoint(saved, "copy", exclude_frozen_parameters=True)
    engine.close()
    for tag in ("snapshot", "copy"):
        with monkeypatch.context() as counting:
            moved = Moved(counting)
            engine = make(resume=saved)
            extents = [group.home.extent for group in engine._groups if not group.home.in_snapshots]
            assert moved.written == sum(extent.nbytes for extent in extents if extent)
        refused: list[Callable[[], object]] = [
            partial(engine, tokens(0)),
            partial(engine.module, tokens(0)),
            engine.state_dict,
            engine.release,
            partial(engine.snapshot_state, saved),
            engine.module.state_dict,
            partial(gather, engine.module),
        ]
        for call in refused:
            with pytest.raises(EngineStateError, match=r"without values.*call load_checkpoint first"):
                call()
        assert engine.load_checkpoint(tmp_path)[0] is None
        with pytest.raises(EngineStateError, match="call load_checkpoint first"):
            engine(tokens(0))
        engine.load_checkpoint(saved, tag)
        outcome = Left.by(engine, losses + train(engine, range(SAVE_AT, STEPS)))
        engine.close()
        assert outcome.differences(reference) == [], tag


def test_a_resume_that_is_announced_needs_all_parameters(begin: Begin, tmp_path: Path, nvme: Path) -> None:
    saved = tmp_path / "saved"
    engine = begin(**STREAMED)()
    path = engine.save_checkpoint(saved, "step").path
    engine.close()
    with pytest.raises(CheckpointError, match="is a checkpoint, not a directory of checkpoints"):
        begin(**STREAMED)(resume=path)
    model = Model()
    model.blocks.append(nn.Linear(WIDTH, WIDTH))
    settings = config(nvme, accumulation=1, snapshots=True, precision="fp32", **STREAMED)
    engine = tiering.initialize(model=model, config=settings, resume=saved).engine
    with pytest.raises(
        CheckpointError, match=r"lacks 'blocks.3.weight'.* initialize\(resume=...\) has not filled"
    ):
        engine.load_checkpoint(saved, load_module_strict=False)
    engine.close()


def gather(module: nn.Module) -> None:
    with tiering.gathered(module):
        pass


def no_room(engine: Engine) -> list[str]:
    """What the swap space says of each section that is asked for too much: the bytes that are left."""
    swap, messages = engine._tiers.swap, list[str]()
    assert swap is not None
    for section in swap.layout([]).sections:
        with pytest.raises(SwapSpaceError, match="bytes left") as caught:
            swap.allocate(1 << 40, ("too much",), section)
        messages.append(caught.value.message)
    return messages


def test_two_jobs_do_not_resume_from_one_snapshot(begin: Begin, tmp_path: Path) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    engine = make()
    engine.snapshot_state(saved)
    engine.close()
    first, second = make(), make()
    before = no_room(first)
    first.load_checkpoint(saved)
    assert no_room(first) == before
    # No run of another process replaces the snapshot before the first one has its own.
    with pytest.raises(BlockingIOError), locked(saved):
        pass
    train(first, range(1))
    with pytest.raises(
        CheckpointError, match="has not ended uses it; close the engine that wrote it or has resumed"
    ):
        second.load_checkpoint(saved)
    # The snapshot of a run is in one directory: in another one, its next snapshot would change this one.
    with pytest.raises(ConfigError, match=f"this engine has its snapshot in {saved}"):
        first.snapshot_state(tmp_path / "elsewhere")
    train(second, range(2))
    first.close()
    second.load_checkpoint(saved)
    assert second.global_steps == 0


def test_a_snapshot_that_another_run_may_replace_is_copied(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, saved = begin(**MIXED), tmp_path / "saved"
    reference = straight(make, STEPS)
    engine, losses = snapshotted(make, saved)
    engine.close()
    caplog.set_level("INFO")
    engine = make()
    with locked(saved):
        engine.load_checkpoint(saved)
    assert f"copied to new swap files, because another run has locked {saved}" in caplog.text
    assert Left.by(engine, losses + train(engine, range(SAVE_AT, STEPS))).differences(reference) == []


def test_what_another_plan_has_is_copied(
    begin: Begin, tmp_path: Path, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = tmp_path / "saved"
    reference = straight(begin(**STREAMED), STEPS)
    engine, losses = snapshotted(begin(**STREAMED), saved)
    engine.close()
    (first,) = nvme.iterdir()
    caplog.set_level("INFO")
    engine = begin(**STREAMED, sub_group_size=1)()
    engine.load_checkpoint(saved)
    assert "copied to new swap files, because this run has another plan" in caplog.text
    losses += train(engine, range(SAVE_AT, STEPS - 1))
    assert [*nvme.iterdir()] == [first]
    engine.snapshot_state(saved)
    (second,) = nvme.iterdir()
    assert second != first
    assert Left.by(engine, losses + train(engine, range(STEPS - 1, STEPS))).differences(reference) == []
    # An engine with a snapshot of its own keeps it.
    engine = begin(**STREAMED)()
    engine.snapshot_state(tmp_path / "other")
    saver = begin(**STREAMED)()
    saver.snapshot_state(tmp_path / "third")
    saver.close()
    engine.load_checkpoint(tmp_path / "third")
    assert "because the swap files of this run have a snapshot already" in caplog.text


def test_what_keeps_a_run_from_adopting(
    begin: Begin, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = begin(**STREAMED, verify=True)()
    snapshot = open_checkpoint(saver.snapshot_state(tmp_path / "saved"))
    saver.close()

    def obstacle(engine: Engine, **changes: Any) -> str:
        return Adoption(snapshot, replace(engine._checkpoints._parts, **changes)).obstacle()

    engine = begin(**STREAMED, verify=True)()
    assert obstacle(engine) == ""
    assert obstacle(engine, world=World(rank=1, size=2)) == "it was saved by 1 rank"
    plan = engine.plan
    tight = replace(plan, budgets=replace(plan.budgets, nvme=PAGE))
    assert "more than nvme_budget" in obstacle(engine, plan=tight)
    swap = engine._tiers.swap
    assert swap is not None
    section = next(iter(swap.layout([]).sections))
    swap.grow(section, PAGE)
    swap.allocate(PAGE, ("activations",), section)
    assert obstacle(engine) == "activations are in the swap space"
    assert "tiering.verify" in obstacle(begin(**STREAMED)())
    # The same tensors in the same extents, of which another number of versions is kept.
    assert obstacle(begin(**STREAMED, verify=True, swap_versions=2)()) == "this run has another plan"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    settings = config(elsewhere, accumulation=1, threshold=40, snapshots=True, precision="fp32", **STREAMED)
    other = tiering.initialize(model=Model(), config=settings).engine
    assert obstacle(other) == "it is in other directories than nvme_path"
    other.close()
    caplog.set_level("INFO")
    begin(**STREAMED, verify=True)().load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    assert "because the load is of a part of it" in caplog.text


def test_files_on_several_paths_are_adopted_at_other_speeds(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parts depend on measured speeds, so that the adopting run has other places until then."""
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    speeds = [3, 1]
    monkeypatch.setattr(slabs, "measure", lambda aio, files: [speed * 10**9 for speed in speeds])
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", 1)
    options = {"accumulation": 1, "threshold": 40, "snapshots": True, "precision": "fp32", **STREAMED}
    settings = config(paths, **options)

    def make() -> Engine:
        return tiering.initialize(model=Model(), config=settings).engine

    reference = straight(make, STEPS)
    engine, losses = snapshotted(make, tmp_path / "saved")
    engine.close()
    files = [file for path in paths for file in path.iterdir()]
    assert len(files) == 2
    speeds.reverse()
    # Its home has whole pages.
    frozen = 2 * PAGE
    for steps in (range(SAVE_AT, SAVE_AT + 1), range(SAVE_AT, STEPS)):
        engine, moved = resumed_by(make, tmp_path / "saved", monkeypatch)
        assert moved.written == frozen
        left = Left.by(engine, losses + train(engine, steps))
        if steps.stop == STEPS:
            engine.snapshot_state(tmp_path / "saved")
        engine.close()
    assert left.differences(reference) == []
    assert [file for path in paths for file in path.iterdir()] == files
