"""Checkpoints with tiles, as commands and functions read them: whole weights, and damage by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.zero3.conftest import SmallModel, batches
from tests.zero3.plain import STREAMED
from tiering.checkpoint.manifest import MANIFEST, read_sealed, write_sealed
from tiering.cli import main
from tiering.errors import CheckpointError
from tiering.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zero3.engine.engine import Engine

Start = Callable[..., Engine]
TILE = 8 << 10


def engine(start: Start, **options: Any) -> Engine:
    torch.manual_seed(3)
    return start(SmallModel(), threshold=0, **options)


@pytest.fixture
def saved(start: Start, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with tiles, and the masters of the run."""
    first = engine(start, tile=TILE)
    for tokens, targets in batches(first.settings.gradient_accumulation_steps):
        first.backward(first(tokens, targets))
        first.step()
    first.save_checkpoint(tmp_path / "checkpoints", tag="saved")
    assert (
        "embedding.tiles.6.weight" in read_sealed(tmp_path / "checkpoints" / "saved" / MANIFEST)["parameters"]
    )
    return tmp_path / "checkpoints" / "saved", first.master_state_dict()


def test_fp32_state_dicts_have_whole_weights(saved: tuple[Path, dict[str, Tensor]]) -> None:
    path, masters = saved
    state = get_fp32_state_dict_from_zero_checkpoint(path.parent, "saved")
    assert {*state} - {*masters} == {"head.weight"}
    assert all(torch.equal(state[name], values) for name, values in masters.items())
    assert state["head.weight"] is state["embedding.weight"]


def test_convert_writes_whole_weights(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    path, masters = saved
    assert main(["convert", str(path), str(tmp_path / "weights")]) == 0
    written = load_file(tmp_path / "weights" / "model.safetensors")
    assert written.keys() == masters.keys()
    assert all(torch.equal(written[name], values) for name, values in masters.items())


def test_inspect_counts_whole_weights(
    saved: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, masters = saved
    assert main(["inspect", str(path), "--json"]) == 0
    checkpoint = json.loads(capsys.readouterr().out)["checkpoint"]
    assert checkpoint["whole"] is True
    assert checkpoint["about"]["parameters"] == len(masters)
    assert checkpoint["about"]["elements"] == sum(values.numel() for values in masters.values())
    weights = next(path.glob("weights-*"))
    content = bytearray(weights.read_bytes())
    content[-5000] ^= 1
    weights.write_bytes(content)
    assert main(["inspect", str(path), "--json"]) == 1
    damage = json.loads(capsys.readouterr().out)["checkpoint"]["damage"]
    assert [name for each in damage for name in each["tensors"] if name not in masters] == []
    assert damage and damage[0]["tensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tiles: tiles[1:], r"'embedding\.weight' is \[525, 48\] and should be \[600, 48\]"),
        (lambda tiles: [*tiles, tiles[0]], "it lists 'embedding.weight', or a tile of it, twice"),
        (lambda tiles: [*tiles, "more"], "it lacks tiles of 'embedding.weight'"),
        (
            lambda tiles: [*tiles, "norm.weight"],
            "the tiles of 'embedding.weight' differ in more than their rows",
        ),
    ],
)
def test_wrong_tiles_are_damage(
    start: Start,
    saved: tuple[Path, dict[str, Tensor]],
    change: Callable[[list[str]], list[str]],
    message: str,
) -> None:
    path, _ = saved
    content = read_sealed(path / MANIFEST)
    content["tiled"]["embedding.weight"] = change(content["tiled"]["embedding.weight"])
    (path / MANIFEST).unlink()
    write_sealed(path / MANIFEST, content)
    other = engine(start, tile=TILE)
    before = other.master_state_dict()
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(path.parent, tag="saved")
    assert all(torch.equal(other.master_state_dict()[name], values) for name, values in before.items())


@pytest.mark.parametrize("tile", [TILE, 2 * TILE, 0], ids=["adopted", "other tiles", "whole"])
@pytest.mark.parametrize("state", ["fp32", "split"])
def test_a_snapshot_of_tiles_is_loaded(start: Start, tmp_path: Path, state: str, tile: int) -> None:
    options = {**STREAMED, "state": state, "snapshots": True}
    first = engine(start, tile=TILE, **options)
    for tokens, targets in batches(first.settings.gradient_accumulation_steps):
        first.backward(first(tokens, targets))
        first.step()
    first.snapshot_state(tmp_path / "saved")
    masters, moments = first.master_state_dict(), first.optimizer.state_dict()["state"]
    first.close()
    other = engine(start, tile=tile, **options)
    assert other.load_checkpoint(tmp_path / "saved")[0] is not None
    assert other.master_state_dict().keys() == masters.keys()
    assert all(torch.equal(values, masters[name]) for name, values in other.master_state_dict().items())
    assert len(other.optimizer.state_dict()["state"]) == len(moments)
