"""Param groups that a script edits between steps: what is in none of them is not stepped, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optim_cpu.formats import round_parameters
from tests.zero3.plain import STREAMED, WIDTH, Loop, Tower, assert_same_everywhere, differing, inputs, update
from tiering.errors import EngineStateError

Start = Callable[..., Any]
Edit = Callable[[list[dict[str, Any]]], None]


def weights_and_others(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() == 2], "lr": 2e-2},
        {"params": [p for p in params if p.dim() != 2], "weight_decay": 0.0},
    ]


def take_out_a_weight(groups: list[dict[str, Any]]) -> None:
    """The wide one of a block, whose norm and biases are stepped in the same tile."""
    groups[0]["params"] = [p for position, p in enumerate(groups[0]["params"]) if position != 3]


def delete_a_group(groups: list[dict[str, Any]]) -> None:
    del groups[0]


def empty_a_group(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].clear()


def move_a_weight(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"].append(groups[0]["params"].pop(3))


EDITS: list[Edit] = [take_out_a_weight, delete_a_group, empty_a_group, move_a_weight]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "step in backward"])
def test_edited_param_groups(start: Start, edit: Edit, in_backward: bool) -> None:
    def script(loop: Loop) -> list[float]:
        losses = []
        for number, x in enumerate(inputs(4)):
            if number == 1:
                edit(loop.optimizer.param_groups)
            losses.append(update(loop, x))
        return losses

    options: dict[str, Any] = {"step_in_backward": True, "clip": 0.0} if in_backward else {}
    run = assert_same_everywhere(start, Tower, script, precision="bf16", groups=weights_and_others, **options)
    for name, master in run.masters.items():
        rounded = torch.empty_like(run.state[name])
        round_parameters(master, rounded)
        assert torch.equal(run.state[name], rounded), f"{name} is not its master"


@pytest.mark.parametrize("in_backward", [False, True], ids=["step", "step in backward"])
def test_parameters_that_cannot_be_stepped_as_they_are_listed(start: Start, in_backward: bool) -> None:
    engine = start(Tower(), accumulation=1, clip=0.0, threshold=0, step_in_backward=in_backward, **STREAMED)
    x, before = next(inputs(1)), engine.master_state_dict()
    groups = engine.optimizer.param_groups
    groups.append({**groups[0], "params": groups[0]["params"][:1]})
    with pytest.raises(EngineStateError, match=r"param groups 0 and 1 have the same parameter.*\(32, 32\)"):
        update(engine, x)
    groups[1]["params"] = [nn.Parameter(torch.ones(3))]
    with pytest.raises(EngineStateError, match=r"shape \(3,\).*not the model's"):
        update(engine, x)
    assert differing(engine.master_state_dict(), before) == []
    groups[1]["params"][0].requires_grad_(False)
    update(engine, x)


def test_groups_that_are_added_as_training_goes_on(start: Start) -> None:
    """Two of the parameters that initialize has seen, with options of their own, and one after the other."""

    def script(loop: Loop) -> list[float]:
        losses, later = [], loop.optimizer.param_groups.pop(0)["params"]
        for number, x in enumerate(inputs(5)):
            if number in (1, 3):
                loop.optimizer.add_param_group({"params": [later.pop(), later.pop()], "lr": 1e-2 / number})
            losses.append(update(loop, x))
        return losses

    assert_same_everywhere(start, Tower, script, precision="bf16", groups=weights_and_others)


def test_parameters_that_are_frozen_after_initialize_and_unfrozen_later(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        blocks, losses = list(loop.module.get_submodule("blocks").children()), []
        for block in blocks:
            block.requires_grad_(False)
        for x in inputs(4):
            losses.append(update(loop, x))
            if blocks:
                blocks.pop().requires_grad_(True)
        return losses

    assert_same_everywhere(start, Tower, script, precision="bf16")


PLACED = pytest.mark.parametrize("placement", [{}, STREAMED], ids=["device", "nvme"])


@PLACED
def test_what_was_frozen_at_initialize_is_refused_before_a_pass(
    start: Start, placement: dict[str, Any]
) -> None:
    model = Tower()
    model.blocks[0].requires_grad_(False)
    engine = start(model, accumulation=1, threshold=0, **placement)
    bias, x = model.get_parameter("blocks.0.1.bias"), next(inputs(1))
    remedy = "Unfreeze all parameters that will be trained.*load_checkpoint"
    with pytest.raises(EngineStateError, match=f"1 parameters.*frozen.*{remedy}"):
        engine.optimizer.add_param_group({"params": bias})
    with pytest.raises(EngineStateError, match="momentum"):
        start(Tower(), rule="SGD").optimizer.add_param_group({"params": [], "momentum": 0.5})
    bias.requires_grad_(True)
    with pytest.raises(EngineStateError, match=rf"'blocks\.0\.1\.bias' was frozen.*{remedy}"):
        engine(x)
    with torch.no_grad():
        engine(x)
    engine.eval()
    loss = engine(x)
    with pytest.raises(EngineStateError, match="was frozen at initialize"):
        engine.backward(loss)
    bias.requires_grad_(False)
    update(engine.train(), x)


@pytest.mark.parametrize("grows", [False, True], ids=["unfrozen", "a new module"])
def test_more_is_trained_by_planning_anew_from_a_checkpoint(
    start: Start, tmp_path: Path, grows: bool
) -> None:
    """As the messages say; what was trained goes on with its state, wherever it lives."""

    def run(placement: dict[str, Any], directory: Path) -> dict[str, Tensor]:
        torch.manual_seed(5)
        model = Tower()
        for thawed in (False, True):
            model.blocks[0].requires_grad_(thawed)
            if thawed and grows:
                model.blocks.append(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
            engine = start(model, accumulation=1, threshold=0, precision="bf16", **placement)
            if thawed:
                engine.load_checkpoint(directory, load_module_strict=not grows)
                assert engine.global_steps == 2
            for x in inputs(2, seed=int(thawed)):
                update(engine, x)
            moments = engine.get_fp32_state("out.weight", "exp_avg")
            masters = engine.master_state_dict()
            engine.save_checkpoint(directory)
            engine.release()
        return masters | {"exp_avg of out.weight": moments}

    there = run(STREAMED, tmp_path / "nvme")
    assert ("blocks.3.1.weight" in there) == grows and there["exp_avg of out.weight"].abs().sum() > 0
    assert differing(run({}, tmp_path / "device"), there) == []
