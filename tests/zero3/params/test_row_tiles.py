"""Layers of tiles compute what whole layers compute, and have their names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tiering
from zero3.params.row_tiles import RowTiledEmbedding, RowTiledLinear, RowTiles

ROWS, COLUMNS = 300, 64


def cut(layer: nn.Module) -> RowTiles:
    """A copy of ``layer`` in tiles of at most 8 KiB."""
    tiled = tiering.tile(copy.deepcopy(layer), "8KiB")
    assert isinstance(tiled, RowTiles)
    return tiled


def linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(COLUMNS, ROWS, bias=bias, dtype=dtype)


def embedding(padding: int | None = None) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(ROWS, COLUMNS, padding_idx=padding)


def run(layer: nn.Module, argument: Tensor, weighting: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of a weighted sum of it: of the "weight", the "bias" and the "input"."""
    if argument.is_floating_point():
        argument = argument.clone().requires_grad_()
    output = layer(argument)
    (output.float() * weighting).sum().backward()
    found = {name: param.grad for name, param in layer.named_parameters() if param.grad is not None}
    if isinstance(layer, RowTiles):
        found["weight"] = torch.cat(
            [found.pop(f"tiles.{number}.weight") for number in range(len(layer.tiles))]
        )
    return output, found if argument.grad is None else {**found, "input": argument.grad}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_computes_what_the_whole_one_does(dtype: torch.dtype, bias: bool) -> None:
    whole = linear(dtype, bias=bias)
    tiled = cut(whole)
    assert isinstance(tiled, RowTiledLinear)
    # Of equal size; where a tile has room for 4,096 elements, it has a multiple of them.
    rows = [30] * 10 if dtype is torch.float32 else [64, 64, 64, 64, 44]
    assert [len(weight) for weight in tiled.tile_weights] == rows
    argument, weighting = torch.randn(5, 7, COLUMNS, dtype=dtype), torch.randn(5, 7, ROWS)
    expected, whole_gradients = run(whole, argument, weighting)
    output, found = run(tiled, argument, weighting)
    assert torch.equal(output, expected) and found.keys() == whole_gradients.keys()
    # A sum for each tile, and one for all.
    torch.testing.assert_close(found.pop("input"), whole_gradients["input"], rtol=2**-7, atol=2**-6)
    assert torch.equal(found["weight"], whole_gradients["weight"])
    if bias:
        torch.testing.assert_close(found["bias"], whole_gradients["bias"])


def test_the_gradient_of_an_input_in_16_bits_is_added_up_in_fp32() -> None:
    """By 200 tiles, of which each rounds its part once: a sum in bf16 would lose the parts that are small beside it."""
    torch.manual_seed(1)
    whole = nn.Linear(COLUMNS, 200, bias=False, dtype=torch.bfloat16)
    tiled = tiering.tile(copy.deepcopy(whole), 2 * COLUMNS)
    argument, weighting = torch.randn(64, COLUMNS).bfloat16(), torch.rand(64, 200)
    with torch.no_grad():
        whole.weight.abs_()
        for number, part in enumerate(tiled.parameters()):
            part.copy_(whole.weight[number : number + 1])
    found = run(tiled, argument, weighting)[1]["input"].double()
    exact = weighting.bfloat16().double() @ whole.weight.detach().double()
    # Of the sum, 2^-9; of the parts much less, because their errors have both signs.
    assert float(((found - exact) / exact).abs().max()) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_copies_the_input_once(dtype: torch.dtype) -> None:
    """A copy for each tile would be kept for backward. Without torch's cache, as the engine runs autocast."""
    whole = linear()
    argument, weighting = torch.randn(5, COLUMNS, dtype=dtype), torch.randn(5, ROWS)
    inputs: set[int] = set()

    def pack(saved: Tensor) -> Tensor:
        if saved.shape == argument.shape:
            inputs.add(saved.untyped_storage()._cdata)
        return saved

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected, whole_gradients = run(whole, argument, weighting)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            output, found = run(cut(whole), argument, weighting)
    assert len(inputs) == 1
    assert output.dtype is torch.bfloat16 and torch.equal(output, expected)
    assert found["input"].dtype is dtype
    torch.testing.assert_close(found["input"], whole_gradients["input"], rtol=2**-7, atol=2**-6)


def test_a_graph_that_goes_backward_twice_gives_the_same_gradients() -> None:
    tiled = cut(linear(torch.bfloat16))
    argument = torch.randn(5, COLUMNS).bfloat16().requires_grad_()
    loss = tiled(argument).square().sum()
    (first,) = torch.autograd.grad(loss, argument, retain_graph=True)
    (second,) = torch.autograd.grad(loss, argument)
    assert torch.equal(first, second) and float(first.abs().sum()) > 0


@pytest.mark.parametrize("padding", [None, 40])
def test_an_embedding_gives_the_bits_of_the_whole_one(padding: int | None) -> None:
    whole = embedding(padding)
    tiled = cut(whole)
    assert isinstance(tiled, RowTiledEmbedding) and len(tiled.tiles) == 10
    # Of the tile 3 none, of others some twice.
    indices = torch.tensor([[299, 0, 40, 31, 32, 40], [5, 64, 0, 65, 290, 299]])
    weighting = torch.randn(2, 6, COLUMNS)
    expected, whole_gradients = run(whole, indices, weighting)
    output, found = run(tiled, indices, weighting)
    assert torch.equal(output, expected) and torch.equal(found["weight"], whole_gradients["weight"])
    assert bool(found["weight"][40].any()) == (padding is None)
    assert tiled(indices[:, :0]).shape == (2, 0, COLUMNS)


@pytest.mark.parametrize("index", [-1, ROWS])
def test_an_index_that_is_no_row_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="out of range: the embedding has 300 rows"):
        cut(embedding())(torch.tensor([0, index]))


def test_shapes_are_computed_on_meta() -> None:
    tiled, linear_tiles = cut(embedding()).to("meta"), cut(linear()).to("meta")
    entries = tiled(torch.zeros(2, 5, dtype=torch.int64, device="meta"))
    assert entries.shape == (2, 5, COLUMNS) and linear_tiles(entries).shape == (2, 5, ROWS)


def test_a_state_dict_has_the_whole_weight() -> None:
    whole = nn.Sequential(embedding(), linear())
    tiled = tiering.tile(copy.deepcopy(whole), "8KiB")
    state = tiled.state_dict()
    assert list(state) == ["0.weight", "1.bias", "1.weight"]
    assert all(torch.equal(state[name], values) for name, values in whole.state_dict().items())
    others = {name: torch.randn_like(values) for name, values in state.items()}
    tiled.load_state_dict(others)
    assert all(torch.equal(tiled.state_dict()[name], values) for name, values in others.items())
    others["1.weight"] = torch.zeros(ROWS + 1, COLUMNS)
    with pytest.raises(RuntimeError, match=r"Missing key.*1\.tiles\.0\.weight"):
        tiled.load_state_dict(others)
    # Each by itself, for code that needs the parameters.
    named = tiled.state_dict(keep_vars=True)
    assert named["0.tiles.9.weight"] is tiled.get_parameter("0.tiles.9.weight")


def test_the_weight_is_named_in_an_error() -> None:
    tiled = cut(linear())
    assert not hasattr(tiled, "weight")
    with pytest.raises(
        AttributeError, match=r"no weight: tiling has cut it into 10 tiles.*gathered.*\(modules\)"
    ):
        tiled.weight  # noqa: B018 # the read raises
    with pytest.raises(AttributeError, match="no weight"):
        tiled.reset_parameters()
    # The layer would not use it.
    with pytest.raises(AttributeError, match="tie weights before tiling"):
        tiled.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
    assert "weight" not in dict(tiled.named_parameters())
