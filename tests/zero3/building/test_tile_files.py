"""Runs with tiles save, load, export and plan whole weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiering
from tests.zero3.conftest import SmallModel, batches, config
from tests.zero3.plain import STREAMED
from tests.zero3.tiled import TILE, assert_same, small, trained
from tiering.checkpoint.manifest import Manifest
from tiering.checkpoint.reader import open_checkpoint
from tiering.errors import CheckpointError, ConfigError
from zero3.building.tiling import tile
from zero3.engine.engine import Engine

Start = Callable[..., Engine]


CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tiles": {"tile": TILE // 2},
    "smaller tiles": {"tile": 3 << 10, **STREAMED},
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("loaded", CUTS)
@pytest.mark.parametrize("saved", ["whole", "tiles"])
def test_checkpoints_load_across_tiles(start: Start, tmp_path: Path, saved: str, loaded: str) -> None:
    first = start(small(), threshold=0, **CUTS[saved])
    trained(first, steps=2)
    first.save_checkpoint(tmp_path, tag="first")
    second = start(small(), threshold=0, **CUTS[loaded])
    second.load_checkpoint(tmp_path, tag="first")
    assert_same(second.master_state_dict(), first.master_state_dict())
    second.save_checkpoint(tmp_path, tag="second")
    contents = [open_checkpoint(tmp_path / tag).rank(0).content for tag in ("first", "second")]
    named = [sorted(content["param_groups"][0]["names"]) for content in contents]
    assert named[0] == named[1] and named[0].count("embedding.weight") == 1
    again = start(small(), threshold=0, **CUTS[saved])
    again.load_checkpoint(tmp_path, tag="second")
    # The state of the optimizer, too.
    assert_same(trained(again), trained(first))


def test_frozen_tiles_that_a_save_excludes_stay(start: Start, tmp_path: Path) -> None:
    def partly_frozen() -> SmallModel:
        model = small()
        model.embedding.requires_grad_(False)
        return model

    first = start(partly_frozen(), threshold=0, tile=TILE // 2)
    expected = trained(first, steps=1)
    first.save_checkpoint(tmp_path, tag="saved", exclude_frozen_parameters=True)
    for options in ({}, {"tile": 3 << 10}):
        other = start(partly_frozen(), threshold=0, **options)
        other.load_checkpoint(tmp_path, tag="saved", load_module_strict=False)
        assert_same(other.master_state_dict(), expected)
    model = partly_frozen()
    model.embedding = nn.Embedding(700, 48).requires_grad_(False)
    model.head = nn.Linear(48, 700, bias=False)
    model.head.weight = model.embedding.weight
    wider = start(model, threshold=0, tile=TILE)
    with pytest.raises(
        CheckpointError, match=r"'embedding\.weight', which it excludes, has shape \[600, 48\]"
    ):
        wider.load_checkpoint(tmp_path, tag="saved", load_module_strict=False)


def test_tiles_keep_their_numbers_of_updates(start: Start, tmp_path: Path) -> None:
    """One is frozen for a step. Larger tiles have the number of the part with the most updates."""

    def engine(**options: Any) -> Engine:
        return start(small(), threshold=0, rule="AdamW", **options)

    first = engine(tile=TILE // 2)
    trained(first, steps=1)
    frozen = first.module.get_parameter("embedding.tiles.1.weight").requires_grad_(False)
    trained(first, steps=1)
    frozen.requires_grad_(True)
    first.save_checkpoint(tmp_path, tag="saved")
    stored = Manifest.read(tmp_path / "saved").parameters
    assert [stored[f"embedding.tiles.{number}.weight"].steps for number in range(3)] == [2, 1, 2]
    again = engine(tile=TILE // 2)
    again.load_checkpoint(tmp_path, tag="saved")
    assert_same(trained(again), trained(first))
    whole = engine()
    whole.load_checkpoint(tmp_path, tag="saved")
    whole.save_checkpoint(tmp_path, tag="whole")
    assert Manifest.read(tmp_path / "whole").parameters["embedding.weight"].steps == 2


def test_a_weight_is_frozen_as_a_whole(start: Start) -> None:
    model = tile(small(), TILE)
    model.get_parameter("embedding.tiles.1.weight").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"some tiles of 'embedding\.weight' are frozen and others trained"):
        start(model)


def test_a_client_keeps_its_state_only_with_the_same_tiles(start: Start, tmp_path: Path) -> None:
    def engine(**options: Any) -> Engine:
        model = small()
        return start(model, client=torch.optim.RMSprop(model.parameters()), threshold=0, **options)

    first = engine(tile=TILE)
    trained(first, steps=1)
    first.save_checkpoint(tmp_path, tag="saved")
    again = engine(tile=TILE)
    again.load_checkpoint(tmp_path, tag="saved")
    assert_same(trained(again), trained(first))
    with pytest.raises(
        CheckpointError, match=r"has other tiles of weights .* cut the model as the saved run did"
    ):
        engine().load_checkpoint(tmp_path, tag="saved")


def test_exports_have_whole_weights(start: Start, tmp_path: Path) -> None:
    cut, whole = start(small(), threshold=0, tile=TILE, **STREAMED), start(small(), threshold=0)
    assert_same(cut.state_dict(), whole.state_dict())
    assert_same(cut.module.state_dict(), whole.module.state_dict())
    state = cut.state_dict()
    assert state["head.weight"] is state["embedding.weight"]
    for directory, engine in ((tmp_path / "cut", cut), (tmp_path / "whole", whole)):
        engine.save_16bit_model(directory)
    exported = load_file(tmp_path / "cut" / "model.safetensors")
    assert_same(exported, load_file(tmp_path / "whole" / "model.safetensors"))
    assert exported["embedding.weight"].shape == (600, 48) and "head.weight" not in exported
    loaded = start(small(), threshold=0, tile=3 << 10, weights=tmp_path / "whole")
    assert_same(loaded.state_dict(), whole.state_dict())


def test_a_state_dict_can_leave_frozen_tiles_out(start: Start) -> None:
    model = small()
    model.embedding.requires_grad_(False)
    engine: Any = start(model, threshold=0, tile=TILE)
    trained_names = {name for name in engine.state_dict() if name not in ("embedding.weight", "head.weight")}
    assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == trained_names


def test_a_loaded_state_dict_changes_the_tiles(start: Start) -> None:
    engine = start(small(), threshold=0, tile=TILE, **STREAMED)
    torch.manual_seed(4)
    others = SmallModel().state_dict()
    engine.module.load_state_dict(others)
    assert_same(engine.state_dict(), {name: values.bfloat16() for name, values in others.items()})


def test_a_plan_without_memory_counts_activations(nvme: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a batch: a forward of tensors without values goes through the tiles of an embedding."""
    with torch.device("meta"):
        model = small()
    settings = config(nvme, threshold=0, **STREAMED, tile=4 << 10)
    plan = tiering.plan_for(model=model, config=settings, batch=next(batches(1)))
    assert any("tiles" in group.name for group in plan.workload.groups)
    assert "activations are not counted" not in caplog.text


def test_a_plan_counts_tiles_of_a_described_model(nvme: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=600,
    ).save_pretrained(tmp_path)
    report = tiering.plan_for(model=tmp_path, config=config(nvme, threshold=0, **STREAMED, tile=16 << 10))
    names = {group.name for group in report.workload.groups}
    assert {"model.embed_tokens.tiles.0", "lm_head.tiles.4"} <= names


def test_a_plan_counts_tiles(nvme: Path) -> None:
    whole, cut = (
        tiering.plan_for(model=small(), config=config(nvme, threshold=0, **STREAMED, tile=size)).workload
        for size in (0, 4 << 10)
    )
    assert max(group.param_bytes for group in whole.groups) == 60 << 10
    assert max(group.param_bytes for group in cut.groups if "tiles" in group.name) == 4 << 10
