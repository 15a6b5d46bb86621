"""Which layers are cut into tiles, and that runs with tiles have the bits of those with whole weights."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiering
from tests.zero3.conftest import NVME_STATE, SmallModel, batches, config
from tests.zero3.plain import STREAMED
from tests.zero3.tiled import TILE, assert_same, small, trained
from tiering.config.training import format_size, parse_size
from tiering.errors import ConfigError, PlacementError, TieringError
from tiering.placement.workload import Workload
from zero3.building.recorded_operations import Cell, Slice
from zero3.building.tape import Tape
from zero3.building.tiling import tile
from zero3.engine.engine import Engine
from zero3.params.row_tiles import RowTiledEmbedding, RowTiledLinear, RowTiles
from zero3.setup import tile_advice

Start = Callable[..., Engine]


def tiles_of(model: nn.Module) -> dict[str, list[int]]:
    """The rows of each tile by the name of the layer."""
    layers = ((name, each) for name, each in model.named_modules() if isinstance(each, RowTiles))
    return {name: [len(weight) for weight in each.tile_weights] for name, each in layers}


# Which layers


def test_large_layers_are_cut_and_tied_ones_share_their_tiles() -> None:
    model = small()
    assert tile(model, TILE) is model
    # In fp32 here: tiles are equal, and whole blocks of 4,096 elements (256 rows of 48) do not fit.
    assert tiles_of(model) == {
        "embedding": [75] * 8,
        **{
            f"blocks.{block}.{name}": rows
            for block in range(3)
            for name, rows in (("up", [64] * 3), ("down", [16] * 3))
        },
        "head": [75] * 8,
    }
    assert isinstance(model.embedding, RowTiledEmbedding) and isinstance(model.head, RowTiledLinear)
    assert model.head.tile_weights == model.embedding.tile_weights
    assert model.get_parameter("blocks.0.up.bias").shape == (192,)


def test_a_tile_begins_where_a_block_of_squares_does() -> None:
    layer = tile(nn.Linear(96, 1000, bias=False), 4 * 96 * 300)
    # 128 rows of 96 are three blocks.
    assert isinstance(layer, RowTiles) and [len(weight) for weight in layer.tile_weights] == [
        256,
        256,
        256,
        232,
    ]


def test_tiles_are_cut_again() -> None:
    model = tile(tile(small(), 2 * TILE, modules=["embedding", "up"]), TILE, modules=["head", "up"])
    assert tiles_of(model) == {
        "embedding": [75] * 8,
        **{f"blocks.{block}.up": [48] * 4 for block in range(3)},
        "head": [75] * 8,
    }
    assert model.head.tile_weights == model.embedding.tile_weights
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in small().state_dict().items())
    tokens, targets = next(batches(1))
    assert torch.equal(model(tokens, targets), small()(tokens, targets))


def test_only_named_layers_are_cut() -> None:
    model = tile(small(), TILE, modules=["up", "blocks.1.down"])
    assert list(tiles_of(model)) == ["blocks.0.up", "blocks.1.up", "blocks.1.down", "blocks.2.up"]
    assert "head" in tiles_of(tile(small(), TILE, modules="embedding"))


@pytest.mark.parametrize(
    ("max_bytes", "modules", "message"),
    [
        (
            100,
            None,
            r"a row of the weight of 'embedding' has 192 B, and a tile may have 100 B; a tile of at least 192 B",
        ),
        ("a lot", None, r"tile: max_bytes: .*a lot"),
        (TILE, "up_proj", r"no module of the model is named 'up_proj', or ends in it"),
        (
            TILE,
            "norm",
            r"'blocks\.0\.norm' cannot be cut: it is a LayerNorm, not an nn\.Linear or nn\.Embedding",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(max_bytes: Any, modules: str | None, message: str) -> None:
    model = small()
    with pytest.raises(ConfigError, match=message):
        tile(model, max_bytes, modules=modules)
    assert tiles_of(model) == {}


class Renamed(nn.Linear):
    """A class of a user, whose forward may read the weight."""


def sharing_a_weight() -> nn.Module:
    layers = nn.ModuleList([nn.Linear(64, 256), Renamed(64, 256)])
    layers[0].weight = layers[1].weight
    return layers


def hooked() -> nn.Module:
    layer = nn.Linear(64, 256)
    layer.weight.register_hook(torch.neg)
    return layer


def patched() -> nn.Module:
    layer = nn.Linear(64, 256)
    layer.forward = functools.partial(nn.functional.linear, weight=layer.weight)
    return layer


def quantised() -> nn.Module:
    return tiering.quantize(nn.Sequential(nn.Linear(64, 256, bias=False)).requires_grad_(False), "int8")


@pytest.mark.parametrize(
    ("build", "name", "reason"),
    [
        (
            lambda: nn.TransformerEncoderLayer(64, 4, 256),
            "linear1",
            "a TransformerEncoderLayer reads its weight",
        ),
        (lambda: Renamed(64, 256), "", "it is a Renamed, whose code may use the weight"),
        (
            lambda: nn.Embedding(256, 64, max_norm=1.0),
            "",
            "max_norm, sparse or scale_grad_by_freq needs all rows",
        ),
        (sharing_a_weight, "0", "a Renamed, which cannot be cut, shares its weight"),
        (hooked, "", "its weight has a hook for gradients"),
        (patched, "", "its forward was replaced by code that may use the weight"),
        (lambda: nn.utils.spectral_norm(nn.Linear(64, 256)), "", "its weight is not a parameter"),
        (quantised, "0", "its weight is quantised"),
    ],
)
def test_layers_that_cannot_be_cut_stay_whole(
    build: Callable[[], nn.Module], name: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(64, 256)})
    with caplog.at_level(logging.WARNING):
        tile(model, TILE)
    assert list(tiles_of(model)) == ["plain"]
    layer = f"odd.{name}".removesuffix(".")
    # The codes of a quantised weight are no matrix, and smaller.
    without = build is quantised or reason == "its weight is not a parameter"
    assert bool(re.search(rf"{re.escape(layer)} \([^)]*{reason}", caplog.text)) != without
    with pytest.raises(ConfigError, match=f"'{layer}' cannot be cut: .*{reason}"):
        tile(model, TILE, modules=layer)


def test_an_adapted_layer_is_cut_below_its_adapter() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = small()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"]))
    tile(adapted, TILE, modules="up")
    x = torch.randn(4, 48)
    expected = nn.functional.linear(x, small().blocks[0].up.weight, small().blocks[0].up.bias)
    torch.testing.assert_close(adapted.base_model.model.blocks[0].up(x), expected)
    assert next(iter(tiles_of(adapted))) == "base_model.model.blocks.0.up.base_layer"


# Training


@pytest.mark.parametrize("place", [{}, STREAMED, {**NVME_STATE, "cache_in_host": True}])
def test_placement_changes_no_bit(start: Start, place: dict[str, Any]) -> None:
    expected = trained(start(tile(small(), TILE), threshold=0))
    engine = start(small(), threshold=0, tile=TILE // 2, **place)
    assert_same(trained(engine), expected)
    assert {"embedding.tiles.0", "embedding.tiles.7"} <= {group.name for group in engine.plan.workload.groups}


def test_a_change_of_a_tile_is_no_change_of_the_others(start: Start) -> None:
    """Views of one tensor share the count of changes by which the engine finds writes that are lost."""
    model = tile(small(), TILE)
    engine = start(model, threshold=0, **STREAMED)
    first = model.head.tile_weights[0]
    with tiering.gathered([first], modify=True), torch.no_grad():
        first.mul_(2)
    expected = small().head.weight.detach().bfloat16()
    expected[: len(first)] *= 2
    assert torch.equal(engine.state_dict()["head.weight"], expected)
    trained(engine, steps=1)


def test_rows_of_tiles_give_the_bits_of_the_whole_embedding(start: Start) -> None:
    """Its tiles are the only ones, so that no gradient of an input is a sum of parts."""

    class Untied(SmallModel):
        def __init__(self) -> None:
            super().__init__(width=64)
            self.head = nn.Linear(64, 600, bias=False)

    def model() -> Untied:
        torch.manual_seed(3)
        return Untied()

    whole, cut = (
        start(model(), threshold=0, **STREAMED),
        start(tile(model(), TILE, modules="embedding"), threshold=0, **STREAMED),
    )
    assert_same(trained(cut), trained(whole))
    assert cut.get_global_grad_norm() == whole.get_global_grad_norm()


def test_a_model_trains_in_less_room_than_a_layer_takes(start: Start, nvme: Path) -> None:
    """The largest layer takes 56 KiB, and the least room for groups that are read is two of them."""
    with pytest.raises(PlacementError, match=r"the largest group, 'embedding', needs 60") as refused:
        start(small(), threshold=0, device_budget="44KiB", prefetch=0, **STREAMED)
    advice = re.search(r"With tiering\.tile of (\S+) (\w+) the model fits", str(refused.value))
    assert advice is not None
    advised = "".join(advice.groups())
    engine = start(small(), threshold=0, device_budget="44KiB", prefetch=0, tile=advised, **STREAMED)
    assert_same(trained(engine), trained(start(small(), threshold=0, tile=advised)))
    # A layer of tiles that are too large can be cut again.
    with pytest.raises(PlacementError, match=r"tiles\.0'.*With tiering\.tile of 8\.00 KiB the model fits"):
        start(small(), threshold=0, device_budget="12KiB", prefetch=0, tile=TILE, **STREAMED)
    # Twice as large is too large.
    twice = 2 * parse_size(advised)
    with pytest.raises(
        PlacementError, match=rf"tiering\.tile of {re.escape(format_size(parse_size(advised)))}"
    ):
        start(small(), threshold=0, device_budget="44KiB", prefetch=0, tile=twice, **STREAMED)
    # The plan of the module, which is not initialized, has the same remedy.
    settings = {"prefetch": 0, "threshold": 0, **STREAMED}
    report = tiering.plan_for(model=small(), config=config(nvme, device_budget="44KiB", **settings))
    (offered,) = (dict(each.change) for each in report.remedies if list(each.change) == ["tiering.tile"])
    assert offered == {"tiering.tile": parse_size(advised)}
    with pytest.raises(PlacementError) as without:
        start(small(), threshold=0, device_budget="4KiB", prefetch=0, **STREAMED)
    assert "tiering.tile" not in str(without.value)


def stored(directory: Path) -> Path:
    save_file(
        {name: values for name, values in small().state_dict().items() if name != "head.weight"},
        directory / "model.safetensors",
    )
    return directory


def test_tiles_are_not_tried_for_more_host_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def loads(model: nn.Module, *_: object, **__: object) -> list[Workload]:
        tried.append(model)
        return []

    monkeypatch.setattr(tile_advice, "_loads", loads)
    with pytest.raises(PlacementError, match="host needs"):
        start(small(), threshold=0, host_budget="4KiB", **STREAMED)
    assert not tried
    with pytest.raises(PlacementError, match="needs 60"):
        start(small(), threshold=0, device_budget="44KiB", prefetch=0, **STREAMED)
    assert tried


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_of_zero_init_gets_the_values_of_one_in_memory(start: Start, inside: bool) -> None:
    expected = start(tile(small(), TILE), threshold=0, precision="fp32").master_state_dict()
    with tiering.zero.Init():
        model = small()
        if inside:
            tile(model, TILE)
    engine = start(tile(model, TILE), threshold=0, precision="fp32")
    assert_same(engine.master_state_dict(), expected)


def test_a_weight_is_computed_once_for_all_of_its_tiles(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its memory is free once all tiles have their values."""
    computed: list[tuple[Cell, torch.UntypedStorage]] = []
    replay = Tape.replay

    def counted(self: Tape, target: Slice) -> Tensor:
        values = replay(self, target)
        if self._replayed is not None and all(self._replayed is not each for each in computed):
            computed.append(self._replayed)
        return values

    monkeypatch.setattr(Tape, "replay", counted)
    with tiering.zero.Init() as init:
        model = small()
    start(tile(model, TILE), threshold=0)
    # The tied weight, and those of two layers in each of three blocks.
    assert len(computed) == 1 + 3 * 2
    assert init.tape._replayed is None


def test_tiles_have_the_marks_of_the_weight_which_is_gone() -> None:
    with tiering.zero.Init():
        model = small()
    weight = model.head.weight
    weight.decays = False
    tile(model, TILE)
    assert [each.decays for each in model.head.tile_weights] == [False] * 8
    with pytest.raises(TieringError):
        weight.sum()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_on_meta_takes_whole_weights_from_files(start: Start, tmp_path: Path, in_place: bool) -> None:
    expected = start(tile(small(), TILE), threshold=0, precision="fp32").state_dict()
    with torch.device("meta"):
        model = small().requires_grad_(not in_place)
    options = {"weights_in_place": True, "rule": None, "offload_param": "nvme"} if in_place else {}
    engine = start(model, threshold=0, precision="fp32", tile=TILE, weights=stored(tmp_path), **options)
    assert_same(engine.state_dict(), expected)
    assert any(group.in_files for group in engine.plan.workload.groups) == in_place


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_that_was_made_before_steps_the_tiles(
    start: Start, kind: type[torch.optim.Optimizer], named: bool
) -> None:
    """RMSprop has no kernel: it steps tensors by itself. With the options of two groups."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        pairs = list(model.named_parameters())
        halves = (pairs[:4], pairs[4:]) if named else ([p for _, p in pairs[:4]], [p for _, p in pairs[4:]])
        return kind([{"params": half, "lr": lr} for half, lr in zip(halves, (1e-3, 1e-2), strict=True)])

    before = small()
    client = made(before)
    first = start(before, client=client, threshold=0, tile=TILE // 2)
    after = tile(small(), TILE)
    pairs = list(small().named_parameters())[:4]
    early = [
        p
        for name, p in after.named_parameters()
        if any(name.startswith(each.rpartition(".")[0]) for each, _ in pairs)
    ]
    late = [p for p in after.parameters() if all(p is not each for each in early)]
    second = start(
        after, client=kind([{"params": early, "lr": 1e-3}, {"params": late, "lr": 1e-2}]), threshold=0
    )
    assert_same(trained(first), trained(second))
    if named:
        for group in client.param_groups:
            assert len(group["param_names"]) == len(group["params"]) == len(set(group["param_names"]))


@pytest.mark.parametrize("place", [{}, STREAMED])
def test_a_whole_weight_is_read_and_set_by_its_name(start: Start, place: dict[str, Any]) -> None:
    """By each name of a tied one."""
    model = small()
    engine = start(model, threshold=0, tile=TILE, accumulation=1, **place)
    trained(engine, steps=1)
    rows = len(model.head.tile_weights[1])
    generator = torch.Generator().manual_seed(5)
    # Gradients are kept in bf16.
    values = [torch.randn(600, 48, generator=generator).bfloat16().float() for _ in range(3)]
    for name, other in (("head.weight", "embedding.weight"), ("embedding.weight", "head.weight")):
        assert engine.is_trained(name) and engine.get_fp32_gradient(name) is None
        engine.set_fp32_parameter(name, values[0])
        engine.set_fp32_state(name, "exp_avg", values[1])
        engine.set_fp32_gradient(name, values[2])
        assert torch.equal(engine.get_fp32_parameter(other), values[0])
        assert torch.equal(engine.get_fp32_state(other, "exp_avg"), values[1])
        gradient = engine.get_fp32_gradient(other)
        assert gradient is not None and torch.equal(gradient, values[2])
        assert torch.equal(engine.get_fp32_parameter("head.tiles.1.weight"), values[0][rows : 2 * rows])
        with pytest.raises(ConfigError, match=r"'head\.weight' has shape \(600, 48\), not \(75, 48\)"):
            engine.set_fp32_state("head.weight", "exp_avg", values[0][:75])
        engine.step()
        assert not torch.equal(engine.get_fp32_parameter(name), values[0])
    # Of one tile alone.
    engine.set_fp32_gradient("head.tiles.1.weight", values[2][rows : 2 * rows])
    gradient = engine.get_fp32_gradient("head.weight")
    assert gradient is not None and int(gradient.any(1).sum()) == rows


def test_an_optimizer_with_state_is_refused(start: Start) -> None:
    model = small()
    client = torch.optim.RMSprop(model.parameters())
    tokens, targets = next(batches(1))
    model(tokens, targets).backward()
    client.step()
    with pytest.raises(ConfigError, match=r"tiering\.tile cuts weights for which the optimizer has state"):
        start(model, client=client, tile=TILE)
