"""A model that is changed behind the engine's back is refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from optim_cpu.formats import round_parameters
from tests.zero3.plain import STREAMED, WIDTH, Tower, differing, inputs, update
from tiering.errors import ConfigError, TieringError
from zero3.deepspeed.state import safe_get_full_fp32_param, safe_get_full_optimizer_state

Start = Callable[..., Any]
OPTIONS: dict[str, Any] = {"accumulation": 1, "threshold": 0}
PLACEMENTS = [pytest.param({}, id="device"), pytest.param(STREAMED, id="nvme")]


def started(start: Start, placement: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    engine = start(Tower(), **OPTIONS, **placement)
    update(engine, next(inputs(1)))
    return engine


def grow(model: Any) -> None:
    model.blocks.append(nn.Linear(WIDTH, WIDTH).bfloat16())


def replace(model: Any) -> None:
    model.blocks[1] = nn.Linear(WIDTH, WIDTH).bfloat16()


def reassign(model: Any) -> None:
    model.out.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16))


def adapt(model: Any) -> None:
    model.get_submodule("blocks.2").register_parameter("scale", nn.Parameter(torch.ones(WIDTH)))


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a module is added": (grow, "blocks.3.weight"),
    "a module is replaced": (replace, "blocks.1.weight"),
    "a parameter is replaced": (reassign, "out.weight"),
    "a parameter is added": (adapt, "blocks.2.scale"),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_the_engine_does_not_know(
    start: Start, change: str, placement: dict[str, Any]
) -> None:
    """They would be trained by nobody."""
    engine = started(start, placement)
    make, name = CHANGES[change]
    make(engine.module)
    with pytest.raises(TieringError) as refusal:
        update(engine, next(inputs(1)))
    assert repr(name) in str(refusal.value)
    assert "initialize" in str(refusal.value), "the remedy is missing"


CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "float": lambda model: model.float(),
    "double": lambda model: model.to(torch.float64),
    "one module's half": lambda model: model.blocks[1].half(),
    "data": lambda model: setattr(model.blocks[1][1].weight, "data", torch.zeros(2 * WIDTH, WIDTH)),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("cast", CASTS)
def test_parameters_that_are_pointed_elsewhere(start: Start, cast: str, placement: dict[str, Any]) -> None:
    """By a cast of the module or by hand: at once, or when the engine meets them, never trained on in silence."""
    engine = started(start, placement)

    def cast_and_update() -> None:
        CASTS[cast](engine.module)
        update(engine, next(inputs(1)))

    with pytest.raises(TieringError) as refusal:
        cast_and_update()
    assert any(repr(name) in str(refusal.value) for name, _ in engine.module.named_parameters())
    assert any(word in str(refusal.value) for word in ("initialize", "gathered")), "the remedy is missing"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_changes_nothing_is_no_change(start: Start, placement: dict[str, Any]) -> None:
    """Train and eval, hooks, buffers and a forward of the user's own."""
    engine, calm = started(start, placement), started(start, placement)
    model = engine.module
    model.train(False).train()
    model.register_buffer("counted", torch.zeros(()))
    model.blocks[0].register_forward_hook(lambda *_: None)
    model.out.forward = lambda x: nn.functional.linear(x, model.out.weight, model.out.bias)
    for x in inputs(3):
        update(engine, x)
        update(calm, x)
    assert differing(engine.master_state_dict(), calm.master_state_dict()) == []


def test_a_parameter_in_two_param_groups(start: Start) -> None:
    model = Tower()
    groups = [{"params": list(model.parameters())}, {"params": [model.out.weight], "lr": 0.0}]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"twice: list each parameter in one param group"):
        start(model, model_parameters=groups, **OPTIONS, **STREAMED)
    assert differing(model.state_dict(), before) == []


def test_a_tied_parameter_with_different_settings_under_its_two_names(start: Start) -> None:
    model = Tower()
    model.out.weight = model.into.weight
    named = dict(model.named_parameters(remove_duplicate=False))
    groups = [
        {"params": [p for name, p in named.items() if name != "out.weight"], "lr": 1e-3},
        {"params": [named["out.weight"]], "lr": 1e-4},
    ]
    with pytest.raises(ConfigError, match="twice"):
        start(model, model_parameters=groups, **OPTIONS, **STREAMED)


def test_a_model_whose_parameters_are_on_tiers_already(start: Start) -> None:
    engine = started(start, STREAMED)
    # The model itself would end its engine, and have a new one.
    with pytest.raises(TieringError, match=r"release\(\)"):
        start(nn.Sequential(engine.module), **OPTIONS, **STREAMED)
    update(engine, next(inputs(1)))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_names_are_those_of_state_dict_after_modules_have_moved(
    start: Start, placement: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name finds the parameter that has it in the model now; a removed parameter keeps its old name."""
    engine = started(start, placement)
    model, before = engine.module, engine.master_state_dict()
    engine.save_checkpoint(tmp_path / "saved")
    assert "modules were moved" not in caplog.text
    first, second, third = model.blocks
    model.blocks = nn.ModuleList([second, first])
    for x in inputs(2):
        update(engine, x)
    masters, weights = engine.master_state_dict(), engine.state_dict()
    assert masters.keys() == weights.keys() == dict(model.named_parameters()).keys()
    for name, master in masters.items():
        rounded = torch.empty_like(weights[name])
        round_parameters(master, rounded)
        assert torch.equal(rounded, weights[name]), name
        assert torch.equal(engine.get_fp32_parameter(name), master), name
    assert torch.equal(
        engine.get_fp32_state("blocks.0.1.weight", "exp_avg"),
        safe_get_full_optimizer_state(second[1].weight, "exp_avg"),
    )
    engine.set_fp32_parameter("blocks.1.1.weight", before["blocks.2.1.weight"])
    with tiering.gathered(first[1].weight) as weight:
        assert torch.equal(weight, before["blocks.2.1.weight"].bfloat16())
    assert torch.equal(engine.get_fp32_parameter("blocks.2.1.weight"), before["blocks.2.1.weight"])
    with pytest.raises(
        ConfigError, match=r"no longer has the parameter that was named 'blocks\.2\.1\.weight'"
    ):
        safe_get_full_fp32_param(third[1].weight)
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "saved", tag="again")
    assert caplog.text.count("modules were moved") == 1


def marked() -> Tower:
    """Blocks with a buffer each, which tells them apart."""
    torch.manual_seed(5)
    model = Tower()
    for number, block in enumerate(model.blocks):
        block.register_buffer("mark", torch.tensor([float(number)]))
    return model


def move_blocks(model: Any) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_checkpoint_of_moved_modules_brings_each_its_own_tensors(
    start: Start, placement: dict[str, Any], tmp_path: Path
) -> None:
    engine = start(marked(), **OPTIONS, **placement)
    move_blocks(engine.module)
    update(engine, next(inputs(1)))
    saved, masters = engine.state_dict(), engine.master_state_dict()
    assert [float(block.mark) for block in engine.module.blocks] == [2, 1, 0]
    engine.save_checkpoint(tmp_path / "saved")
    engine.module.blocks[0].mark.fill_(7)
    update(engine, next(inputs(1)))
    assert differing(engine.master_state_dict(), masters) == sorted(masters)
    engine.load_checkpoint(tmp_path / "saved")
    assert differing(engine.state_dict(), saved) == []
    assert differing(engine.master_state_dict(), masters) == []

    for moved_first in (True, False):
        other = start(marked(), **OPTIONS, **placement)
        if moved_first:
            move_blocks(other.module)
        other.load_checkpoint(tmp_path / "saved")
        if not moved_first:
            move_blocks(other.module)
        assert differing(other.state_dict(), saved) == []
        assert differing(other.master_state_dict(), masters) == []
