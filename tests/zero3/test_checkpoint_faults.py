"""What goes wrong with a save or a load: told with names, the last checkpoint whole, training goes on."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import signal
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tiering
from tiering.aio import AioContext, Fault, FaultPlan
from tiering.checkpoint import writer
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, EngineStateError, TieringError
from zero3 import tiers
from zero3.engine import Engine
from zero3.fill import Fill
from zero3.saver import Saver

from .resuming import MIXED, STREAMED, Left, Model, straight, tokens, train

SETTINGS: dict[str, Any] = {"precision": "bf16", "accumulation": 1, "threshold": 40}
Start = Callable[..., Engine]


def begin(start: Start, build: Callable[[], nn.Module] = Model, **options: Any) -> Engine:
    return start(build(), **(SETTINGS | options))


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No file may grow beyond ``nbytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def undisturbed(start: Start, steps: int, **options: Any) -> Left:
    return straight(lambda: begin(start, **options), steps)


# What a save meets


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


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_write_that_fails_names_the_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, first: int
) -> None:
    torch.manual_seed(1)
    engine = begin(start, **STREAMED)
    torch.manual_seed(2)
    plain, fault = AioContext, FaultPlan((Fault("write", first=first, error=errno.EIO),))
    monkeypatch.setattr(writer, "AioContext", lambda **options: plain(fault=fault, **options))
    with pytest.raises(CheckpointError, match=r"global_step0.*safetensors: it cannot be written: EIO"):
        engine.save_checkpoint(tmp_path / "saved", background=background).wait()
    assert entries(tmp_path / "saved") == []
    assert Left.by(engine, train(engine, range(3))).differences(undisturbed(start, 3, **STREAMED)) == []


def test_state_that_cannot_be_read_is_not_saved_and_the_parameter_is_named(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = AioContext
    for first in range(1, 100, 16):
        fault = FaultPlan((Fault("read", first=first, error=errno.EIO, count=1),))
        with monkeypatch.context() as patch:
            patch.setattr(tiers, "AioContext", lambda fault=fault, **options: plain(fault=fault, **options))
            engine = begin(start, **STREAMED)
        with pytest.raises(CheckpointError, match=r"EIO.*'[a-z0-9_.]+'|'[a-z0-9_.]+'.*EIO"):  # noqa: PT012 (which save meets it depends on the plan)
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
    _, found = engine.load_checkpoint(tmp_path / "saved")
    assert found["progress"][0] == 1
    assert found["progress"][1].dtype is torch.bool
    assert found["none"].shape == (0, 3)
    assert found["scalar"].shape == ()


def test_tensors_of_every_dtype_come_back_in_client_state(start: Start, tmp_path: Path) -> None:
    from zero3.plain import DTYPES

    engine = begin(start)
    state = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}
    engine.save_checkpoint(tmp_path, client_state=state)
    _, found = engine.load_checkpoint(tmp_path)
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in state.items()
    }
    assert all(found[name].view(torch.uint8).equal(state[name].view(torch.uint8)) for name in state)


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


def test_two_engines_do_not_save_to_one_directory(start: Start, tmp_path: Path) -> None:
    one, other = begin(start), begin(start)
    one.save_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="another run saves to"):
        other.save_checkpoint(tmp_path, "other")
    assert other.load_checkpoint(tmp_path)[0] is not None
    one.close()
    other.save_checkpoint(tmp_path, "other")


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
    kept = Left.by(engine).tensors
    assert all(value.equal(kept[name]) for name, value in Left.by(early).tensors.items())
    train(early, range(2))


def test_a_load_that_finds_nothing_changes_nothing(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    with torch.no_grad():
        engine.module.scale.fill_(0.25)  # type: ignore[operator, union-attr]
    assert engine.load_checkpoint(tmp_path / "saved") == (None, {})
    assert engine.get_fp32_parameter("scale") == 0.25


# Ctrl-C, and other ways to leave


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

    def held(*args: Any) -> None:
        finish.wait(30)
        copy(*args)

    for background in (False, True):
        monkeypatch.setattr(Saver, "_copy", held)
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
    kept = Left.by(engine)
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
        assert Left.by(engine).differences(kept) == []
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
    monkeypatch.setattr(type(engine.optimizer), "_run_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(engine, range(1))
    with pytest.raises(EngineStateError, match="initialize the model again from a checkpoint"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("how", ["close", "drop", "exception"])
def test_however_an_engine_ends_a_save_in_the_background_does(
    start: Start, tmp_path: Path, nvme: Path, how: str
) -> None:
    from .conftest import config

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
        thread = engine.save_checkpoint(tmp_path / "saved", background=True)._checkpoints._under_way.saver  # type: ignore[union-attr]
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

    def held(*args: Any) -> None:
        forked.wait(30)
        copy(*args)

    monkeypatch.setattr(Saver, "_copy", held)
    saving = engine.save_checkpoint(tmp_path, background=True)
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 8
    forked.set()
    saving.wait()
    assert open_checkpoint(saving.path).manifest.step == 0


# What a load meets


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints of a run, "good" and "bad"; each test takes a copy."""
    from .conftest import config

    directory = tmp_path_factory.mktemp("damage")
    os.environ["TIERING_DEVICE"] = "cpu"
    torch.manual_seed(1)
    with tiering.initialize(model=Model(), config=config(directory, **SETTINGS)).engine as engine:
        train(engine, range(2))
        engine.save_checkpoint(directory, "good")
        train(engine, range(1))
        engine.save_checkpoint(directory, "bad", client_state={"tensor": torch.arange(3000)})
    return directory


@pytest.fixture
def spoilt(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def refused(start: Start, spoilt: Path, match: str, **options: Any) -> None:
    """The bad one is refused, and the good one is loaded afterwards, and trains."""
    engine = begin(start, **options)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(spoilt, "bad")
    engine.load_checkpoint(spoilt, "good")
    train(engine, range(1))
    engine.close()


FILES = [
    f"{kind}-00001-of-00001.safetensors" for kind in ("weights", "exp_avg", "exp_avg_sq", "rank", "checksums")
]
JSON = ["checkpoint.json", "rank-00001-of-00001.json"]


@pytest.mark.parametrize("name", FILES + JSON)
def test_a_file_that_is_gone_cut_or_flipped_is_named(start: Start, spoilt: Path, name: str) -> None:
    file = spoilt / "bad" / name
    content = file.read_bytes()
    refuse = {name: lambda: refused(start, spoilt, name)}[name]
    if name == "checkpoint.json":
        file.unlink()
        refused(start, spoilt, "holds no checkpoint 'bad'")
    else:
        file.unlink()
        refuse()
    for cut in (0, 7, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:cut])
        refuse()
    file.write_bytes(content + b"\0" * 4096)
    refuse()
    for place in (0, 9, 60, len(content) // 2, len(content) - 3):
        flipped = bytearray(content)
        flipped[place] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"bad/[a-z]"):
            begin(start).load_checkpoint(spoilt, "bad")


def test_the_parameter_in_whose_bytes_a_bit_has_flipped_is_named(start: Start, spoilt: Path) -> None:
    from safetensors import safe_open

    for kind, name in (
        ("weights", "blocks.0.0.weight"),
        ("exp_avg", "table.weight"),
        ("exp_avg_sq", "blocks.1.3.weight"),
    ):
        file = spoilt / "bad" / f"{kind}-00001-of-00001.safetensors"
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        begins, ends = header[name]["data_offsets"]
        flipped = bytearray(content)
        flipped[8 + length + (begins + ends) // 2] ^= 16
        file.write_bytes(flipped)
        with safe_open(file, "pt") as read:  # nobody else sees it
            read.get_tensor(name)
        refused(start, spoilt, rf"{kind}-00001.*'{name}' is not what was written: bytes \d+ to \d+")
        refused(start, spoilt, rf"{kind}-00001.*'{name}' is not what was written", **STREAMED)
        file.write_bytes(content)


def test_another_model_or_optimizer_is_refused_before_anything_changes(
    start: Start, spoilt: Path, tmp_path: Path
) -> None:
    class Wider(Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(70, 32)
            self.head.weight = self.table.weight

    def unchanged(engine: Engine, match: str, **options: Any) -> None:
        before = Left.by(engine)
        with pytest.raises(CheckpointError, match=match):
            engine.load_checkpoint(spoilt, "bad", **options)
        assert Left.by(engine).differences(before) == []
        train(engine, range(1))

    unchanged(
        begin(start, Wider),
        r"of another model: .*'table.weight' is \[60, 32\] and should be \[70, 32\]",
    )
    unchanged(
        begin(start, rule="Lion", optimizer={"lr": 1e-4}),
        r"of AdamW? \(exp_avg, exp_avg_sq\).*Lion \(exp_avg\)",
    )

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        found = [param for param in model.parameters() if param.requires_grad]
        return [{"params": found[:3]}, {"params": found[3:]}]

    model = Model()
    engine = start(model, model_parameters=groups(model), **SETTINGS)
    unchanged(engine, "1 param groups?, and the optimizer 2")
    engine = begin(start, rule="Lion", optimizer={"lr": 1e-4})
    engine.load_checkpoint(spoilt, "bad", load_optimizer_states=False)
    train(engine, range(1))


def test_another_schedule_is_refused_by_name(start: Start, tmp_path: Path, nvme: Path) -> None:
    from .conftest import config

    def scheduled(make: Callable[[Any], Any]) -> Engine:
        return tiering.initialize(model=Model(), config=config(nvme, **SETTINGS), lr_scheduler=make).engine

    with scheduled(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)) as engine:
        engine.save_checkpoint(tmp_path / "saved")
    with scheduled(
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ) as engine:
        with pytest.raises(CheckpointError, match=r"schedul.*LambdaLR.*load_lr_scheduler_states=False"):
            engine.load_checkpoint(tmp_path / "saved")
        engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
        train(engine, range(1))


def sealed(content: Any) -> bytes:
    """As a stranger would write it who knows the sum."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({"crc32": f"{zlib.crc32(text.encode()):08x}", "content": content}).encode()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=8) | st.sampled_from(["$tensor", "$tuple", "$dict", "$size"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def rewritten(directory: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    """Put ``value`` at ``path`` of the content of a JSON file, and let all sums and sizes agree with it."""
    file, record = directory / name, directory / "checkpoint.json"
    content = {"root": json.loads(file.read_bytes())["content"]}
    inner: Any = content
    for key in ("root", *path)[:-1]:
        inner = inner[key]
    inner[("root", *path)[-1]] = value
    file.write_bytes(sealed(content["root"]))
    if file != record:
        manifest = json.loads(record.read_bytes())["content"]
        manifest["files"][name] = file.stat().st_size
        record.write_bytes(sealed(manifest))


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("engine",), None, "engine of the checkpoint is a NoneType"),
        (("engine", "micro_steps"), None, r"engine\['micro_steps'\] of the checkpoint is a NoneType"),
        (("engine", "steps"), [3], r"engine\['steps'\] of the checkpoint is a list"),
        (("engine", "loss_scale"), {}, r"engine\['loss_scale'\] of the checkpoint has no 'dynamic'"),
        (("param_groups",), {}, "param_groups of the checkpoint is a dict"),
        (("param_groups", 0), 3, r"param_groups\[0\] of the checkpoint is a int"),
        (
            ("param_groups", 0, "options", "lr"),
            "x",
            r"param_groups\[0\]\['options'\]\['lr'\] of the checkpoint is a str",
        ),
        (("param_groups", 0, "options", "lr"), None, r"\['lr'\] of the checkpoint is a NoneType"),
        (("param_groups", 0, "names", 0), [3], r"a name in param_groups\[0\] of the checkpoint is a list"),
        (("extra_state",), 3, "extra_state of the checkpoint is a int"),
        (("client_state",), [3], "client_state of the checkpoint is a list"),
        (("random",), 3, "the random states are a int"),
        (("buffers",), ["none"], "it has no buffer 'none'"),
        (("client_state",), {"$tensor": "none"}, "client_state has '.tensor', but there is no 'none'"),
    ],
    ids=str,
)
def test_what_no_run_has_said_is_refused(
    start: Start, spoilt: Path, path: tuple[Any, ...], value: Any, match: str
) -> None:
    rewritten(spoilt / "bad", "rank-00001-of-00001.json", path, value)
    refused(start, spoilt, match)


@pytest.mark.parametrize("name", JSON)
def test_a_digit_that_was_changed_in_json_is_found(start: Start, spoilt: Path, name: str) -> None:
    file = spoilt / "bad" / name
    content = file.read_bytes()
    changed = content.replace(b'"steps": 3', b'"steps": 2')
    assert changed != content
    file.write_bytes(changed)
    refused(start, spoilt, f"{name}: .* its content is not what its crc32 says")


@pytest.mark.parametrize("name", JSON)
def test_hostile_json_is_refused_and_the_engine_goes_on(
    saved: Path, tmp_path: Path, start: Start, name: str
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    directory = tmp_path / "copy"
    file = directory / "bad" / name
    whole = file.read_bytes()
    engine = begin(start)
    where = list(places(json.loads(whole)["content"]))

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.sampled_from(where), VALUES)
    def hostile(path: tuple[Any, ...], value: Any) -> None:
        file.write_bytes(whole)
        rewritten(directory / "bad", name, path, value)
        try:
            engine.load_checkpoint(directory, "bad")
        except TieringError:
            engine.load_checkpoint(directory, "good")
        train(engine, range(1))

    hostile()
