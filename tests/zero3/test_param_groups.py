"""Param groups that a script edits between steps: what is in none of them is not stepped, wherever it lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .plain import Loop, Tower, assert_same_everywhere, inputs, update

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
        rounded = master.to(torch.bfloat16)
        assert torch.equal(run.state[name], rounded), f"{name} is not its master"
