"""What goes wrong with a save or a load: told with names, the last checkpoint whole, training goes on."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoints import Start, begin, entries, undisturbed
from tests.zero3.resuming import STREAMED, Left, tokens, train
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, EngineStateError, SwapError, TieringError
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.weights import tensor_file
from zero3.device import tiers


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No file may grow beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("room", [0, 6000, 30_000])
def test_a_disk_that_is_full_costs_that_checkpoint_alone(
    start: Start, tmp_path: Path, background: bool, room: int
) -> None:
    torch.manual_seed(1)
    engine = begin(start)
    torch.manual_seed(2)
    losses = train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    losses += train(engine, range(2, 3))
    with pytest.raises(CheckpointError, match=r"EFBIG.*ulimit"), limited(room):  # noqa: PT012 (which call tells it is how it was saved)
        saving = engine.save_checkpoint(tmp_path / "saved", background=background)
        losses += train(engine, range(3, 4))
        saving.wait()
    done = len(losses)
    assert entries(tmp_path / "saved") == ["global_step2", "latest"]
    open_checkpoint(tmp_path / "saved" / "global_step2")
    engine.save_checkpoint(tmp_path / "saved")
    losses += train(engine, range(done, 6))
    assert Left.by(engine, losses).differences(undisturbed(start, 6)) == []


@pytest.mark.one_of(2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_write_that_fails_names_the_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, first: int
) -> None:
    torch.manual_seed(1)
    engine = begin(start, **STREAMED)
    torch.manual_seed(2)
    plain, fault = AioContext, FaultPlan((Fault("write", first=first, error=errno.EIO),))
    monkeypatch.setattr(tensor_file, "AioContext", lambda **options: plain(fault=fault, **options))
    with pytest.raises(CheckpointError, match=r"global_step0.*safetensors: it cannot be written: EIO"):
        engine.save_checkpoint(tmp_path / "saved", background=background).wait()
    assert entries(tmp_path / "saved") == []
    assert Left.by(engine, train(engine, range(3))).differences(undisturbed(start, 3, **STREAMED)) == []


def test_a_load_mends_state_that_was_lost(
    start: Start, tmp_path: Path, plan_fault: Callable[..., None]
) -> None:
    plan_fault(Fault("write", first=45, error=errno.EIO))
    torch.manual_seed(1)
    engine = begin(start, **STREAMED)
    torch.manual_seed(2)
    engine.save_checkpoint(tmp_path / "saved")
    errors: list[str] = []
    while len(errors) < 3:
        try:
            train(engine, range(1))
        except SwapError as error:
            errors.append(error.message)
    assert all(
        "EIO" in each and "if they are parameters or optimizer state, load a checkpoint" in each
        for each in errors[1:]
    )
    engine.load_checkpoint(tmp_path / "saved")
    assert Left.by(engine, train(engine, range(3))).differences(undisturbed(start, 3, **STREAMED)) == []


def test_state_that_cannot_be_read_is_not_saved_and_the_parameter_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = AioContext
    for first in range(1, 100, 16):
        fault = FaultPlan((Fault("read", first=first, error=errno.ENXIO, count=1),))
        with monkeypatch.context() as patch:
            patch.setattr(tiers, "AioContext", lambda fault=fault, **options: plain(fault=fault, **options))
            engine = begin(start, **STREAMED)
        with pytest.raises(CheckpointError, match=r"ENXIO.*'[a-z0-9_.]+'|'[a-z0-9_.]+'.*ENXIO"):  # noqa: PT012 (which save meets it depends on the plan)
            for _ in range(20):
                engine.save_checkpoint(tmp_path / f"saved{first}")
        engine.save_checkpoint(tmp_path / f"saved{first}")
        engine.close()


@pytest.mark.parametrize("background", [False, True])
def test_a_thread_that_is_not_to_be_had_is_told_and_the_next_save_goes_well(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    engine = begin(start)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", _no_thread)
        with pytest.raises(CheckpointError, match="can't start new thread"):
            engine.save_checkpoint(tmp_path / "saved", background=background).wait()
    assert entries(tmp_path / "saved") == []
    train(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved", background=background).wait()
    assert entries(tmp_path / "saved") == ["global_step1", "latest"]


def _no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_client_state_without_plain_form_leaves_nothing(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    with pytest.raises(TieringError, match=r"client_state\['progress'\]\[1\] is of class builtins.object"):
        engine.save_checkpoint(tmp_path / "saved", client_state={"progress": [1, object()]})
    assert not (tmp_path / "saved").exists()
    state = {
        "progress": (1, torch.ones(2, dtype=torch.bool)),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3),
    }
    engine.save_checkpoint(tmp_path / "saved", client_state=state)
    _, state_back = engine.load_checkpoint(tmp_path / "saved")
    assert state_back["progress"][0] == 1
    assert state_back["progress"][1].dtype is torch.bool
    assert state_back["none"].shape == (0, 3)
    assert state_back["scalar"].shape == ()


def test_tensors_of_every_dtype_come_back_in_client_state(start: Start, tmp_path: Path) -> None:
    from zero3.checkpoint.encoding import DTYPES

    engine = begin(start)
    state = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    engine.save_checkpoint(tmp_path, client_state=state)
    _, tensors = engine.load_checkpoint(tmp_path)
    assert {name: value.dtype for name, value in tensors.items()} == {
        name: value.dtype for name, value in state.items()
    }
    assert all(tensors[name].view(torch.uint8).equal(state[name].view(torch.uint8)) for name in state)


def test_what_cannot_be_a_checkpoint_is_refused_before_anything_is_written(
    start: Start, tmp_path: Path
) -> None:
    engine = begin(start)
    (tmp_path / "file").write_text("")
    for call in (
        lambda: engine.save_checkpoint(tmp_path / "saved", "../other"),
        lambda: engine.save_checkpoint(tmp_path / "saved", keep=0),
        lambda: engine.save_checkpoint(tmp_path / "file"),
        lambda: engine.load_checkpoint(tmp_path / "saved", "none"),
        lambda: engine.load_checkpoint(tmp_path / "saved", "../other"),
    ):
        with pytest.raises(TieringError):
            call()
    assert not (tmp_path / "saved").exists() or entries(tmp_path / "saved") == []
    assert engine.load_checkpoint(tmp_path / "saved") == (None, {})
    engine.save_checkpoint(tmp_path / "saved", 5)
    assert engine.load_checkpoint(tmp_path / "saved", 5)[0] == str(tmp_path / "saved" / "5")


def test_the_same_tag_again_latest_and_keep(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    engine.save_checkpoint(tmp_path / "saved", "same")
    train(engine, range(2))
    masters = engine.master_state_dict()
    engine.save_checkpoint(tmp_path / "saved", "same")
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved", "other", save_latest=False)
    engine.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(masters[name], master) for name, master in engine.master_state_dict().items())
    assert entries(tmp_path / "saved") == ["latest", "other", "same"]
    for number in range(3):
        train(engine, range(number, number + 1))
        engine.save_checkpoint(tmp_path / "saved", keep=2, background=True).wait()
    assert entries(tmp_path / "saved") == ["global_step4", "global_step5", "latest", "other", "same"]


def test_a_save_waits_for_the_end_of_what_would_be_cut_in_two(start: Start, tmp_path: Path) -> None:
    engine = begin(start, accumulation=2, **STREAMED)
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        handle = engine.module.blocks[0].register_forward_hook(lambda *_, call=call: call(tmp_path / "saved"))  # type: ignore[index, union-attr]
        with pytest.raises(EngineStateError, match="while a forward or backward is running"):
            engine(tokens(0))
        handle.remove()
        with (
            pytest.raises(EngineStateError, match=r"inside tiering.gathered"),
            tiering.gathered(engine.module.scale),
        ):
            call(tmp_path / "saved")
    train(engine, range(1))
    with pytest.raises(EngineStateError, match="with gradients that no step has used"):
        engine.save_checkpoint(tmp_path / "saved")
    train(engine, range(1, 2))
    engine.backward(engine(tokens(2)))
    with pytest.raises(EngineStateError, match="with gradients that no step has used"):
        engine.save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    engine.close()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(EngineStateError, match=r"after close\(\)"):
            call(tmp_path / "saved")


def test_a_load_drops_what_was_for_the_parameters_of_before(start: Start, tmp_path: Path) -> None:
    engine = begin(start, accumulation=2)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path / "saved")
    train(engine, range(1))
    waiting = engine(tokens(1))
    engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    assert engine.micro_steps == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(waiting)
    engine.backward(engine(tokens(1)))
    engine.load_checkpoint(tmp_path / "saved")
    with pytest.raises(EngineStateError, match="without a backward"):
        engine.step()
    early = begin(start, step_in_backward=True, clip=0.0)
    early.backward(early(tokens(1)))
    early.load_checkpoint(tmp_path / "saved")
    before = Left.by(engine).tensors
    assert all(value.equal(before[name]) for name, value in Left.by(early).tensors.items())
    train(early, range(2))


def test_a_load_that_finds_nothing_changes_nothing(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    with torch.no_grad():
        engine.module.scale.fill_(0.25)  # type: ignore[operator, union-attr]
    assert engine.load_checkpoint(tmp_path / "saved") == (None, {})
    assert engine.get_fp32_parameter("scale") == 0.25
