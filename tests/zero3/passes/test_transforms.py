"""torch.func over a model whose parameters are offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tiering
from tests.zero3.plain import PLACEMENTS, STREAMED, Loop, Tower, differing, inputs, run_engine, update
from tiering.errors import EngineStateError

Start = Callable[..., Any]


def per_sample(loop: Loop, params: dict[str, Tensor], x: Tensor) -> list[float]:
    """The norm of each sample's gradient."""

    def loss(params: dict[str, Tensor], sample: Tensor) -> Any:
        return functional_call(loop.module, params, (sample[None],))

    gradients = vmap(grad(loss), (None, 0))(params, x)
    squares = torch.stack([each.double().flatten(1).square().sum(1) for each in gradients.values()])
    return [float(norm) for norm in squares.sum(0).sqrt()]


def test_gradients_of_samples_by_copies_of_the_parameters(start: Start) -> None:
    def script(loop: Loop, ask: bool = True) -> list[float]:
        figures = []
        for x in inputs(3):
            copies = {name: value.clone() for name, value in loop.module.state_dict().items()}
            figures += per_sample(loop, copies, x) if ask else []
            figures.append(update(loop, x))
        return figures

    reference = run_engine(start, Tower, script)
    undisturbed = run_engine(start, Tower, lambda loop: script(loop, ask=False))
    assert differing(reference.masters, undisturbed.masters) == []
    for where, placement in PLACEMENTS.items():
        run = run_engine(start, Tower, script, **placement)
        assert run.losses == reference.losses, where
        assert differing(run.masters, reference.masters) == [], where


def test_inside_gathered_where_nothing_moves(start: Start) -> None:
    def script(loop: Loop) -> list[float]:
        (x,) = inputs(1)
        with tiering.gathered(loop.module):
            inside = per_sample(loop, {n: p.detach() for n, p in loop.module.named_parameters()}, x)
        assert inside == per_sample(loop, dict(loop.module.state_dict()), x)
        return inside

    assert min(run_engine(start, Tower, script).losses) > 0


def test_offloaded_parameters_themselves_are_refused(start: Start) -> None:
    engine = start(Tower(), precision="fp32", accumulation=1, threshold=0, **STREAMED)
    (x,) = inputs(1)
    with pytest.raises(
        EngineStateError, match=r"torch\.func differentiates through .*copies = engine\.state_dict"
    ):
        grad(lambda x: engine.module(x))(x)
    assert update(engine, x) > 0


@pytest.mark.parametrize("placement", [{"activations": "host", "activation_budget": "1MiB"}, STREAMED])
def test_a_transform_inside_of_a_forward_is_explained(start: Start, placement: dict[str, Any]) -> None:
    class Score(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = super().forward(grad(lambda each: each.sin().sum())(x)).square().mean()
            return loss

    engine = start(Score(4, 4), precision="fp32", accumulation=1, threshold=0, **placement)
    with pytest.raises(RuntimeError, match="saved tensor hooks") as raised:
        engine(torch.ones(2, 4))
    (note,) = raised.value.__notes__
    assert "Use torch.autograd.grad inside of it" in note
