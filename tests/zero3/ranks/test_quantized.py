"""Quantised layers with several ranks: encoded while their weights stream in, saved, loaded elsewhere, exported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tests.zero3.conftest import VOCABULARY, same_bits
from zero3.building import encoded_weights, fill

from .pool import Pool
from .training import start, train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
STAGES: dict[int, dict[str, Any]] = {
    0: {},
    1: {},
    2: {"offload_optimizer": "cpu", "sub_group_size": 2048},
    3: STREAMED,
}


class QuantisedModel(nn.Module):
    """Frozen layers between which shards of two and of four ranks begin and end, and a trained head."""

    def __init__(self, form: str, *, device: str = "cpu", quantised: bool = True) -> None:
        super().__init__()
        with torch.device(device):
            self.embed = nn.Embedding(VOCABULARY, 64)
            self.up = nn.Linear(64, 160)
            self.down = nn.Linear(160, 64, bias=False)
            self.head = nn.Linear(64, VOCABULARY)
        self.requires_grad_(False)
        if quantised:
            tiering.quantize(self, form, modules=["up", "down"], block_size=32)
        self.head.requires_grad_(True)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.down(functional.gelu(self.up(self.embed(inputs))))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def plain(form: str) -> dict[str, Tensor]:
    torch.manual_seed(11)
    return QuantisedModel(form, quantised=False).state_dict()


def codes_of(form: str) -> dict[str, Tensor]:
    """The frozen values that one process encodes from weights in memory."""
    torch.manual_seed(11)
    values = QuantisedModel(form).state_dict()
    return {name: value for name, value in values.items() if not name.startswith("head")}


def encodes(rank: int, nvme: Path, weights: Path, form: str, **options: Any) -> dict[str, Tensor]:
    """The values of a model on the meta device whose weights were encoded as they were read, in small ranges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "RANGE", 1000)
        patch.setattr(encoded_weights, "PASS", 1024)
        with start(nvme, partial(QuantisedModel, form, device="meta"), weights=weights, **options) as engine:
            values: dict[str, Tensor] = engine.state_dict()
            return values


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_encode_the_codes_of_one_process(
    ranks: Ranks, nvme: Path, tmp_path: Path, world_size: int, form: str, stage: int
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(plain(form), file)
    expected = codes_of(form)
    for values in ranks(world_size).run(encodes, nvme, file, form, stage=stage, **STAGES[stage]):
        assert same_bits({name: values[name] for name in expected}, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_no_placement_changes_a_bit(ranks: Ranks, nvme: Path, form: str) -> None:
    build = partial(QuantisedModel, form)
    runs = [
        run
        for place in (STREAMED, {"threshold": 0})
        for run in ranks(2).run(train, nvme, build=build, stage=3, other_seeds=True, **place)
    ]
    for run in runs[1:]:
        assert run.differing(runs[0], losses=False) == []
    assert runs[0].losses == runs[2].losses and len({*runs[0].losses}) == len(runs[0].losses)
    torch.manual_seed(3)
    built = QuantisedModel(form).state_dict()
    for name in ("up.weight", "up.weight_scales", "down.weight", "down.weight_scales"):
        assert torch.equal(runs[0].weights[name], built[name])


def saves(rank: int, nvme: Path, directory: Path, form: str, **options: Any) -> dict[str, Tensor]:
    with start(nvme, partial(QuantisedModel, form), **options) as engine:
        engine.save_checkpoint(directory, tag="one")
        engine.save_16bit_model(directory / "export")
        values: dict[str, Tensor] = engine.state_dict()
        return values


def loads(rank: int, nvme: Path, directory: Path, form: str, **options: Any) -> dict[str, Tensor]:
    with start(nvme, partial(QuantisedModel, form), other_seeds=True, **options) as engine:
        engine.load_checkpoint(directory)
        values: dict[str, Tensor] = engine.state_dict()
        return values


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_other_ranks_load_a_quantised_base(ranks: Ranks, nvme: Path, tmp_path: Path, form: str) -> None:
    saved, other = ranks(2).run(saves, nvme, tmp_path / "run", form, **STREAMED)
    assert same_bits(saved, other) == []
    model = QuantisedModel(form)
    model.load_state_dict(saved)
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == plain(form).keys()
    for name in ("up", "down"):
        layer: Any = model.get_submodule(name)
        assert torch.equal(exported[f"{name}.weight"], layer.dequantized_weight(torch.bfloat16))
    for world_size, options in ((1, STREAMED), (2, {"stage": 2}), (4, STREAMED), (4, {"stage": 1})):
        for values in ranks(world_size).run(loads, nvme, tmp_path / "run", form, **options):
            assert same_bits(values, saved) == [], (world_size, options)
