"""``zero.TiledLinear`` maps inputs to outputs as a whole layer does, and is trained in less room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiering
from tests.zero3.plain import STREAMED
from tiering.errors import ConfigError
from tiering.runtime.zero.tiling import TiledLinearReturnBias
from tiering.zero import TiledLinear
from zero3.engine.engine import Engine

Start = Callable[..., Engine]
INPUTS, OUTPUTS = 50, 70


def whole(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(INPUTS, OUTPUTS, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (1, 3), (4, 1), (3, 4)])
def test_outputs_are_those_of_the_whole_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    layer = whole(bias=bias)
    tiled = TiledLinear(
        INPUTS, OUTPUTS, bias=bias, in_splits=in_splits, out_splits=out_splits, init_linear=layer
    )
    x = torch.randn(6, INPUTS)
    expected, output = layer(x), tiled(x)
    if in_splits == 1:
        assert torch.equal(output, expected)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    # Each part of the grid has its part of the inputs: the gradient of a row is the sum of the inputs.
    for row in tiled.linears:
        found = torch.cat([linear.weight.grad for linear in row], 1)
        torch.testing.assert_close(found, x.sum(0).expand(len(found), -1))
        assert [linear.bias is not None for linear in row] == [False] * (in_splits - 1) + [bias]


def test_parts_have_deepspeeds_sizes_and_names() -> None:
    tiled = TiledLinear(INPUTS, OUTPUTS, in_splits=4, out_splits=3)
    assert (tiled.in_parts, tiled.out_parts) == ([0, 13, 26, 38, 50], [0, 24, 47, 70])
    names = {name: tuple(param.shape) for name, param in tiled.named_parameters()}
    assert names["linears.0.0.weight"] == (24, 13) and names["linears.2.3.weight"] == (23, 12)
    assert names["linears.2.3.bias"] == (23,) and "linears.2.2.bias" not in names


def test_parts_are_taken_and_given_as_they_are() -> None:
    layer = whole()
    tiled = TiledLinear(
        INPUTS, OUTPUTS, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False,
        init_linear=layer,
    )  # fmt: skip
    x = torch.randn(6, INPUTS)
    outputs = tiled(x.split(25, -1))
    assert [part.shape for part in outputs] == [(6, 35), (6, 35)]
    torch.testing.assert_close(torch.cat(outputs, -1), layer(x))
    for wrong in (x, x.split(10, -1)):
        with pytest.raises(ConfigError, match="as 2 parts with 25, 25 features"):
            tiled(wrong)
    with pytest.raises(ConfigError, match=r"has 50 inputs and was called with a tensor of shape \(6, 49\)"):
        TiledLinear(INPUTS, OUTPUTS)(x[:, :49])


class ReturnsBias(nn.Linear):
    """As Megatron's layers do."""

    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_return_their_bias(bias: bool) -> None:
    layer = whole(bias=bias)
    tiled = TiledLinearReturnBias(
        INPUTS, OUTPUTS, bias=bias, in_splits=2, out_splits=3, linear_cls=ReturnsBias, init_linear=layer
    )
    x = torch.randn(6, INPUTS)
    product, found = tiled(x)
    torch.testing.assert_close(product, nn.functional.linear(x, layer.weight))
    assert (found is None) == (not bias) and (not bias or torch.equal(found, layer.bias))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_splits": 0}, "in_splits is 0; it must be a number from 1 to in_features, 50"),
        ({"out_splits": 71}, "out_splits is 71; it must be a number from 1 to out_features, 70"),
        (
            {"init_linear": nn.Linear(50, 60)},
            r"50 inputs, 70 outputs and a bias.*shape \(60, 50\) and a bias",
        ),
        ({"init_linear": nn.Linear(50, 70, bias=False)}, "70 outputs and a bias.* and no bias"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TiledLinear(INPUTS, OUTPUTS, **arguments)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            TiledLinear(64, 64, in_splits=2, out_splits=4, bias=False) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def trained(engine: Engine) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        engine.backward(engine(torch.randn(8, 64, generator=generator).bfloat16()))
        engine.step()
    return engine.master_state_dict()


@pytest.mark.parametrize("initialised", ["in memory", "zero.Init"])
def test_it_is_trained_part_by_part(start: Start, initialised: str) -> None:
    def model() -> Model:
        torch.manual_seed(0)
        with tiering.zero.Init(enabled=initialised == "zero.Init"):
            return Model()

    expected = trained(start(model(), threshold=0))
    # A block has 8 KiB, and each part of it 1 KiB, which is padded to a page.
    engine = start(model(), threshold=0, device_budget=6 << 10, prefetch=0, **STREAMED)
    found = trained(engine)
    assert "blocks.0.linears.3.1" in {group.name for group in engine.plan.workload.groups}
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_values_are_set_on_the_tiers(start: Start) -> None:
    model = Model()
    engine = start(model, threshold=0, **STREAMED)
    source = nn.Linear(64, 64, bias=False)
    model.blocks[1].copy_params_from(source)
    state = engine.state_dict()
    assert torch.equal(state["blocks.1.linears.3.1.weight"], source.weight[48:, 32:].bfloat16())
