"""What a checkpoint takes over of a run beside its tensors, what stays the new run's, and what is refused by name."""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

import optim_cpu
import tiering
from tests.zero3.checkpoints import SETTINGS, Start, begin
from tests.zero3.conftest import config, same_bits
from tests.zero3.inside import saver_of
from tests.zero3.resuming import STREAMED, Model, moments, tokens, train
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError
from zero3.building.weights import FileSource, OpenFiles
from zero3.checkpoint.restore import _order
from zero3.checkpoint.saving import Saver
from zero3.engine.engine import Engine
from zero3.loop import data_loader
from zero3.params.layout import lay_out, shard


def with_client(start: Start, make: Callable[[list[nn.Parameter]], Any], **options: Any) -> Engine:
    model = Model()
    trained = [param for param in model.parameters() if param.requires_grad]
    return start(model, client=make(trained), rule=None, **(SETTINGS | options))


@pytest.mark.parametrize(("saved", "here"), [("Adam", "AdamW"), ("AdamW", "Adam")])
def test_how_weights_decay_stays_as_the_optimizer_was_made(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: str, here: str
) -> None:
    options = {"Adam": {"lr": 1e-3, "adam_w_mode": False}, "AdamW": {}}
    engine = begin(start, rule=saved, optimizer=options[saved])
    train(engine, range(1))
    path = engine.save_checkpoint(tmp_path).path
    assert open_checkpoint(path).manifest.optimizer == saved
    other = begin(start, rule=here, optimizer=options[here])
    caplog.set_level(logging.WARNING)
    other.load_checkpoint(tmp_path)
    assert other.optimizer.param_groups[0]["decoupled_weight_decay"] is (here == "AdamW")
    assert f"the state of {saved} is loaded as that of {here}" in caplog.text
    assert f"decoupled_weight_decay {saved == 'AdamW'}" in caplog.text


@pytest.mark.parametrize("placement", [{}, STREAMED], ids=["memory", "nvme"])
def test_subnormals_of_an_earlier_version_load_and_are_zeros_in_the_next_step(
    start: Start, tmp_path: Path, placement: dict[str, Any]
) -> None:
    """Since steps have no subnormals, only checkpoints of earlier versions do. They load as they were written."""
    name, smallest, least_normal = "blocks.1.0.weight", 2.0**-149, torch.finfo(torch.float32).tiny
    states = {}
    for kind in ("subnormal", "zero"):
        torch.manual_seed(1)
        engine = begin(start, precision="fp32", **placement)
        train(engine, range(1))
        for state in ("exp_avg", "exp_avg_sq"):
            values = engine.get_fp32_state(name, state)
            generator = torch.Generator().manual_seed(4)
            chosen = torch.rand(values.shape, generator=generator) < 0.5
            tiny = torch.randint(1, 2**23, values.shape, generator=generator) * smallest
            values[chosen] = tiny[chosen] if kind == "subnormal" else 0.0
            engine.set_fp32_state(name, state, values)
            assert bool(((values > 0) & (values < least_normal)).any()) is (kind == "subnormal")
            states[kind, state] = values
        engine.save_checkpoint(tmp_path / kind)
        engine.close()
    after = []
    for kind in ("subnormal", "zero"):
        engine = begin(start, precision="fp32", **placement)
        engine.load_checkpoint(tmp_path / kind)
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(engine.get_fp32_state(name, state), states[kind, state])
        engine.backward(engine(tokens(1)))
        # Any gradient would be so much larger that they do not count.
        engine.set_fp32_gradient(name, torch.zeros_like(values))
        engine.step()
        after.append(moments(engine) | dict(engine.master_state_dict()))
    assert same_bits(*after) == []


def test_the_format_of_state_stays_as_the_optimizer_was_made(start: Start, tmp_path: Path) -> None:
    engine = with_client(start, lambda trained: optim_cpu.AdamW(trained, lr=1e-3, state_format="fp32"))
    train(engine, range(1))
    engine.save_checkpoint(tmp_path)
    make = lambda trained: optim_cpu.AdamW(trained, lr=1e-4, state_format="split+bf16")  # noqa: E731 (a fixture's argument)
    other = with_client(start, make)
    other.load_checkpoint(tmp_path)
    group = other.optimizer.param_groups[0]
    assert group["state_format"] == "split+bf16"
    assert group["lr"] == 1e-3
    train(other, range(1))


def test_groups_that_hold_other_parameters_are_refused_by_a_name(start: Start, tmp_path: Path) -> None:
    def grouped(order: int) -> Engine:
        model = Model()
        trained = [param for param in model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
        ][::order]
        return start(model, model_parameters=groups, **SETTINGS)

    engine = grouped(1)
    engine.save_checkpoint(tmp_path)
    grouped(1).load_checkpoint(tmp_path)
    other = grouped(-1)
    before = other.master_state_dict()
    with pytest.raises(CheckpointError, match=r"'nothing' was in param group 0 and is in group 1 here"):
        other.load_checkpoint(tmp_path)
    assert all(before[name].equal(master) for name, master in other.master_state_dict().items())
    train(other, range(1))


class Counting(nn.Module):
    """Has state that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"calls": 0, "amax": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        return x

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Counted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.counting(super().forward(tokens))


def test_modules_extra_state_comes_back(start: Start, tmp_path: Path) -> None:
    engine = begin(start, Counted)
    train(engine, range(3))
    engine.module.counting.seen["amax"].fill_(7)  # type: ignore[operator, union-attr]
    engine.save_checkpoint(tmp_path)
    engine.module.counting.seen["amax"].fill_(8)  # type: ignore[operator, union-attr]
    other = begin(start, Counted)
    other.load_checkpoint(tmp_path)
    counts = other.module.counting.seen
    assert counts["calls"] == 3  # type: ignore[index]
    assert counts["amax"].equal(torch.full((2,), 7.0))  # type: ignore[index, union-attr]


class Buffered(Model):
    """One buffer under two names, of which the second is saved."""

    def __init__(self) -> None:
        super().__init__()
        twice = torch.zeros(3)
        self.register_buffer("first", twice, persistent=False)
        self.register_buffer("second", twice)


def test_a_buffer_is_saved_by_the_name_under_which_it_is_persistent(start: Start, tmp_path: Path) -> None:
    engine = begin(start, Buffered)
    engine.module.second.fill_(5)  # type: ignore[operator, union-attr]
    engine.save_checkpoint(tmp_path)
    other = begin(start, Buffered)
    other.load_checkpoint(tmp_path)
    assert other.module.second.tolist() == [5, 5, 5]  # type: ignore[operator, union-attr]
    assert other.module.first is other.module.second


def test_a_buffer_of_a_dtype_that_files_lack_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    class Complex(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))

    with pytest.raises(ConfigError, match=r"buffer 'phases' has dtype torch.complex128.*persistent=False"):
        begin(start, Complex).save_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_client_state_that_is_no_dict_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client_state is a list: pass a dict"):
        begin(start).save_checkpoint(tmp_path / "saved", client_state=[1])
    assert not (tmp_path / "saved").exists()


def test_a_default_device_of_the_scripts_changes_nothing(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    engine.save_checkpoint(tmp_path)
    files = open_checkpoint(tmp_path / "global_step0").weights
    whole = files.tensors["frozen"]
    opened = OpenFiles()
    source = FileSource((whole, whole), opened)
    with opened.reading(files, engine.settings.tiering.io, (whole, whole)):
        expected = torch.cat([source.read(0, whole.numel).clone()] * 2)
        with DeviceContext(torch.device("meta")):
            assert source.read(0, 2 * whole.numel).equal(expected)
    torch.manual_seed(4)
    order = list(data_loader.WholeSampler(range(9)))  # type: ignore[arg-type] # has what a data set needs
    torch.manual_seed(4)
    with DeviceContext(torch.device("meta")):
        assert list(data_loader.WholeSampler(range(9))) == order  # type: ignore[arg-type] # as above


def scheduled(nvme: Path, make: Callable[[Any], Any]) -> Engine:
    return tiering.initialize(model=Model(), config=config(nvme, **SETTINGS), lr_scheduler=make).engine


def test_another_schedule_is_refused_before_anything_changes(nvme: Path, tmp_path: Path) -> None:
    schedulers = torch.optim.lr_scheduler
    with scheduled(nvme, lambda optimizer: schedulers.StepLR(optimizer, 2)) as engine:
        train(engine, range(1))
        engine.save_checkpoint(tmp_path / "saved")
    with scheduled(nvme, lambda optimizer: schedulers.ExponentialLR(optimizer, 0.5)) as engine:
        before = engine.master_state_dict()
        with pytest.raises(CheckpointError, match=r"has a StepLR.*ExponentialLR"):
            engine.load_checkpoint(tmp_path / "saved")
        train(engine, range(0))
        assert all(before[name].equal(master) for name, master in engine.master_state_dict().items())
        engine.save_checkpoint(tmp_path / "other")


def test_functions_of_a_schedule_are_left_out_and_named(
    nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Scaled(torch.optim.lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Any, factor: Callable[[int], float]) -> None:
            self.factor = factor
            super().__init__(optimizer)

        def get_lr(self) -> list[float]:
            return [base * self.factor(self.last_epoch) for base in self.base_lrs]

    caplog.set_level(logging.WARNING)
    with scheduled(nvme, lambda optimizer: Scaled(optimizer, lambda step: 1 / (1 + step))) as engine:
        train(engine, range(3))
        engine.save_checkpoint(tmp_path / "saved")
    assert "'factor'" in caplog.text
    with scheduled(nvme, lambda optimizer: Scaled(optimizer, lambda step: 1 / (2 + step))) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, range(3, 4))
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 6)


def test_what_a_schedule_gives_that_has_no_plain_form_is_told_with_who_gave_it(
    nvme: Path, tmp_path: Path
) -> None:
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"odd": object()}

    with scheduled(nvme, lambda optimizer: Odd(optimizer, 2)) as engine:
        with pytest.raises(
            ConfigError, match=r"\['odd'\] is of class .*the learning rate schedule's state_dict"
        ):
            engine.save_checkpoint(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        train(engine, range(1))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 20),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.8)],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_by_its_rates_without_the_optimizers_state(
    nvme: Path, tmp_path: Path, name: str
) -> None:
    """Those that multiply the rate that they find, too."""
    with scheduled(nvme, SCHEDULES[name]) as engine:
        train(engine, range(4))
        engine.save_checkpoint(tmp_path)
        train(engine, range(3))
        expected = engine.optimizer.param_groups[0]["lr"]
    with scheduled(nvme, SCHEDULES[name]) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        train(engine, range(3))
        assert engine.optimizer.param_groups[0]["lr"] == expected


class Unfinished(Model):
    """Has a parameter that files may leave out, by its own word."""

    _keys_to_ignore_on_load_missing = (r"^extra$",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(64, 64))


@pytest.mark.parametrize("places", [{}, STREAMED], ids=["memory", "nvme"])
def test_a_parameter_that_files_may_leave_out_stays_as_it_is(
    start: Start, tmp_path: Path, places: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    saved = begin(start)
    saved.save_checkpoint(tmp_path)
    engine = begin(start, Unfinished, **places)
    engine.set_fp32_parameter("extra", torch.full((64, 64), 1.0 + 2**-20))
    expected = {**saved.master_state_dict(), "extra": engine.get_fp32_parameter("extra")}
    engine.load_checkpoint(tmp_path)
    assert "was saved without 'extra': they keep the values of this model" in caplog.text
    masters = engine.master_state_dict()
    assert masters.keys() == expected.keys()
    assert all(masters[name].equal(master) for name, master in expected.items())


def test_copies_to_the_device_have_ended_before_the_host_changes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward without gradients may still be fetching when a load, or a set, begins."""
    engine = begin(start)
    engine.save_checkpoint(tmp_path)
    engine.set_fp32_parameter("frozen", torch.full((32, 32), 2.0))
    values: list[float] = []

    class Fetching:
        def before_host_changes(self) -> None:
            values.append(engine._state.weights(engine.module)["frozen"].max().item())

    loader = engine._checkpoints._loader
    tiers = copy.copy(loader._parts.tiers)
    monkeypatch.setattr(tiers, "streams", Fetching())
    monkeypatch.setattr(loader, "_parts", replace(loader._parts, tiers=tiers))
    monkeypatch.setattr(engine._state, "_streams", Fetching())
    engine.load_checkpoint(tmp_path)
    assert values == [2.0]
    assert engine.get_fp32_parameter("frozen").max() != 2.0
    engine.set_fp32_parameter("frozen", torch.full((32, 32), 3.0))
    assert 3.0 not in values
    assert len(values) > 1


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_ranks_read_each_element_of_each_part_once(world_size: int) -> None:
    """Whatever ranks have saved the parts, and whoever reads them now."""
    shapes = [(300, 70), (5,), (), (0, 3), (4096,), (301, 71), (9001,)]
    named = [(index, f"p{index}", shape, index not in (3, 5, 6)) for index, shape in enumerate(shapes)]
    layout = lay_out(named, 2, world_size, {5: torch.uint8, 6: torch.int64})
    params = [object() for _ in layout.pieces]
    sources, read = {}, Counter[str]()
    for param, piece in zip(params, layout.pieces, strict=True):
        numel = math.prod(piece.shape)
        cuts = [0, numel // 3, numel // 2, numel]
        sources[param] = SimpleNamespace(
            parts=[
                SimpleNamespace(name=f"{piece.name} {start}", numel=end - start)
                for start, end in pairwise(cuts)
            ]
        )
    for rank in range(world_size):
        group = SimpleNamespace(
            layout=layout,
            shard=shard(layout, world_size, rank),
            sharded=world_size > 1,
            params=params,
            dtype=torch.bfloat16,
        )
        for part, first, end in _order([group], sources):  # type: ignore[list-item, arg-type, misc] # stand in
            assert 0 <= first < end <= part.numel
            read[part.name] += end - first
    parts = [part for source in sources.values() for part in source.parts]
    assert read == {part.name: part.numel for part in parts if part.numel}


def test_a_save_that_is_given_up_says_that_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives it up: Ctrl-C, a rank that is lost, close()."""
    begun, copy = threading.Event(), Saver._copy

    def cancelled(self: Saver, writers: Any) -> None:
        begun.set()
        while not self._cancelled:
            time.sleep(0.001)
        copy(self, writers)

    monkeypatch.setattr(Saver, "_copy", cancelled)
    engine = begin(start)
    saving = engine.save_checkpoint(tmp_path, background=True)
    saver = saver_of(engine)
    assert begun.wait(30)
    saver.cancel()
    with pytest.raises(CheckpointError, match="the save was cancelled; save again") as caught:
        saving.wait()
    assert "clos" not in str(caught.value)


def test_one_tensor_of_another_shape_is_told_as_one(start: Start, tmp_path: Path) -> None:
    begin(start).save_checkpoint(tmp_path)

    class Wider(Model):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.zeros(32, 33), requires_grad=False)

    with pytest.raises(CheckpointError, match=r"has 1 tensor whose shape differs.*'frozen' is \[32, 32\]"):
        begin(start, Wider).load_checkpoint(tmp_path)
