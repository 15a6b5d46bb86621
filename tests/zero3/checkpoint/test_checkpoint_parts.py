"""Checkpoints that have a part of a model: without its frozen parameters, or of a model that was another one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero3.resuming import MIXED, ON_CPU, STREAMED, WIDTH, Left, Model, train
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError
from zero3.device.home import Home
from zero3.device.tiers import Tiers
from zero3.engine.engine import Engine

Start = Callable[..., Engine]
PLACEMENTS: dict[str, dict[str, Any]] = {"memory": {}, "cpu": ON_CPU, "nvme": STREAMED, "mixed": MIXED}


class Adapted(Model):
    """Of its blocks a vector each is trained, or all of the last one; the head is, too, and the table that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)
        self.blocks[0].append(nn.LayerNorm(WIDTH))
        self.blocks[1].insert(0, nn.Linear(WIDTH, WIDTH, bias=False))


FROZEN = {name for name, param in Adapted().named_parameters() if not param.requires_grad}
TRAINED = {name for name, _ in Adapted().named_parameters()} - FROZEN


def begin(start: Start, build: Callable[[], nn.Module] = Adapted, *, seed: int = 1, **options: Any) -> Engine:
    torch.manual_seed(seed)
    settings = {"precision": "bf16", "accumulation": 1, "threshold": 40, **options}
    return start(build(), **settings)


def loaded(engine: Engine, directory: Path, **how: Any) -> Left:
    torch.manual_seed(7)
    path, _ = engine.load_checkpoint(directory, **how)
    assert path is not None
    return Left.by(engine)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_goes_on_without_the_frozen_parameters_of_the_file(
    start: Start, tmp_path: Path, placement: str, background: bool
) -> None:
    """To the bits of a run that nobody stopped, on the placement that comes next."""
    following = [*PLACEMENTS][([*PLACEMENTS].index(placement) + 1) % len(PLACEMENTS)]
    engine = begin(start, **PLACEMENTS[placement])
    losses = train(engine, range(3))
    saving = engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True, background=background)
    losses += train(engine, range(3, 5))
    saving.wait()
    expected = Left.by(engine, losses)
    engine.close()
    engine = begin(start, **PLACEMENTS[following])
    train(engine, range(10, 11))  # what it trains is another one's until it is loaded
    loaded(engine, tmp_path)
    assert Left.by(engine, losses[:3] + train(engine, range(3, 5))).differences(expected) == []


def test_memory_that_the_cpu_does_not_address_keeps_its_values(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's: what is written there is put together elsewhere."""
    engine = begin(start, lambda: Adapted().requires_grad_())
    begin(start).save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    masters = {name: engine.get_fp32_parameter(name) + 1 for name in FROZEN}
    for name, values in masters.items():
        engine.set_fp32_parameter(name, values)
    monkeypatch.setattr(Home, "on_host", property(lambda home: False))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(77))
    outcome = loaded(engine, tmp_path)
    assert [name for name in FROZEN if not outcome.tensors[f"master of {name}"].equal(masters[name])] == []
    assert [name for name in FROZEN if not outcome.tensors[name].equal(masters[name].bfloat16())] == []


def test_what_is_frozen_is_neither_in_the_file_nor_written_when_it_is_loaded(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin(start, **STREAMED)
    train(engine, range(1))
    whole, part = (
        open_checkpoint(engine.save_checkpoint(tmp_path, tag, exclude_frozen_parameters=tag == "part").path)
        for tag in ("whole", "part")
    )
    assert part.weights.tensors.keys() == part.manifest.parameters.keys() == TRAINED
    assert part.manifest.excluded == {name: whole.manifest.parameters[name] for name in FROZEN}
    assert whole.manifest.excluded == {}
    frozen_bytes = sum(whole.weights.tensors[name].nbytes for name in FROZEN)
    assert whole.manifest.files["weights-00001-of-00001.safetensors"] - frozen_bytes == pytest.approx(
        part.manifest.files["weights-00001-of-00001.safetensors"], abs=4096
    )

    written, writing = [], Tiers.writing
    monkeypatch.setattr(Tiers, "writing", lambda *args: written.append(args[1:4]) or writing(*args))
    engine.load_checkpoint(tmp_path, "part")
    for group in engine._state._groups:
        ends = {offset + nbytes for home, offset, nbytes in written if home is group.home}
        assert max(ends, default=0) == group.layout.trainable_numel * group.dtype.itemsize, group.name
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "was saved without" in warnings[0].getMessage() and f"and {len(FROZEN) - 3} more" in caplog.text


def test_a_parameter_that_was_excluded_and_is_trained_now_keeps_its_master(
    start: Start, tmp_path: Path
) -> None:
    begin(start).save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    for state in ("fp32", "split"):
        outcomes = []
        for options in PLACEMENTS.values():
            engine = begin(start, lambda: Adapted().requires_grad_(), state=state, **options)
            train(engine, range(2))
            masters = {name: engine.get_fp32_parameter(name) for name in FROZEN}
            moved = [name for name in FROZEN if engine.get_fp32_state(name, "exp_avg").any()]
            assert len(moved) == len(FROZEN)
            outcome = loaded(engine, tmp_path)
            for name in FROZEN:
                assert outcome.tensors[f"master of {name}"].equal(masters[name]), name
                assert not outcome.tensors[f"exp_avg of {name}"].any()
            assert outcome.rest["steps of parameters"] == {}
            outcomes.append(Left.by(engine, train(engine, range(2))))
            engine.close()
        assert all(each.differences(outcomes[0]) == [] for each in outcomes), state


class Grown(Model):
    """With another block, and without the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(WIDTH, WIDTH))
        del self.scale
        self.scale = 1.0


NEW = ["blocks.3.weight", "blocks.3.bias"]


def test_what_only_one_side_has_is_left(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin(start, Model)
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    saved = Left.by(engine)
    outcomes = []
    for options in PLACEMENTS.values():
        engine = begin(start, Grown, seed=2, **options)
        train(engine, range(3))
        with pytest.raises(
            CheckpointError, match=r"blocks\.3\.weight.*load_module_strict=False ignores tensors"
        ):
            engine.load_checkpoint(tmp_path)
        masters = {name: engine.get_fp32_parameter(name) for name in NEW}
        assert engine.get_fp32_state(NEW[0], "exp_avg").any()
        outcome = loaded(engine, tmp_path, load_module_strict=False)
        for name, value in outcome.tensors.items():
            if "blocks.3" not in name:
                assert value.equal(saved.tensors[name]), name
        assert all(outcome.tensors[f"master of {name}"].equal(masters[name]) for name in NEW)
        assert not any(outcome.tensors[f"exp_avg of {name}"].any() for name in NEW)
        assert set(outcome.rest["steps of parameters"].values()) == {2}
        assert len(outcome.rest["steps of parameters"]) == len(saved.rest["steps of parameters"]) - 1
        outcomes.append(Left.by(engine, train(engine, range(2, 4))))
        engine.close()
    assert all(each.differences(outcomes[0]) == [] for each in outcomes)
    assert "2 missing ('blocks.3.weight'; 'blocks.3.bias')" in caplog.text
    assert "1 unexpected ('scale')" in caplog.text


def test_a_client_s_state_is_not_given_to_other_parameters(start: Start, tmp_path: Path) -> None:
    def client(params: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, lr=1e-3)

    begin(start, Model, client=client, rule=None).save_checkpoint(tmp_path)
    engine = begin(start, Grown, client=client, rule=None)
    with pytest.raises(CheckpointError, match="a RMSprop keeps its state by their numbers: build"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)


def spoil(path: Path) -> None:
    file = path / "exp_avg-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_after_a_load_that_failed_only_what_is_still_whole_is_kept(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    for tag in ("whole", "part", "spoilt whole", "spoilt part"):
        engine.save_checkpoint(tmp_path, tag, exclude_frozen_parameters="part" in tag)
    spoil(tmp_path / "spoilt whole")
    spoil(tmp_path / "spoilt part")
    expected = Left.by(engine)
    for failing, message in (
        ("spoilt part", ""),
        ("spoilt whole", "lacks .*which a failed load has already overwritten"),
    ):
        with pytest.raises(CheckpointError, match="exp_avg"):
            engine.load_checkpoint(tmp_path, failing)
        if message:
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(tmp_path, "part")
            engine.load_checkpoint(tmp_path, "whole")
        assert loaded(engine, tmp_path, tag="part").differences(expected) == []


def test_what_is_excluded_has_the_shape_of_the_model_s(start: Start, tmp_path: Path) -> None:
    begin(start).save_checkpoint(tmp_path, exclude_frozen_parameters=True)

    class Wider(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.zeros(32, 33), requires_grad=False)

    with pytest.raises(
        CheckpointError, match=r"'frozen', which it excludes, has shape \[32, 32\] and not \[32, 33\]"
    ):
        begin(start, Wider).load_checkpoint(tmp_path)


def test_calls_that_nothing_can_be_made_of_are_told(start: Start, tmp_path: Path) -> None:
    engine = begin(start)
    with pytest.raises(ConfigError, match=r"does not support custom_load_fn: leave it out"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)  # type: ignore[arg-type]
    for call in (engine.load_checkpoint, engine.save_checkpoint):
        for nothing in (None, ""):
            with pytest.raises(ConfigError, match=f"{call.__name__} got {nothing!r} as its directory"):
                call(nothing)  # type: ignore[operator]
    train(engine, range(1))
