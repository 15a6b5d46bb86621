"""initialize(weights=...): first values from files, straight to the tiers, the same bits wherever they live."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiering
from tests.zero3.conftest import SmallModel, batches
from tiering.errors import SwapError, WeightsError
from zero3.building import fill, tape

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = [{}, {"offload_param": "cpu", "offload_optimizer": "cpu"}, STREAMED]
BUILDS = ["in memory", "under Init", "on meta"]


def build(how: str, seed: int = 5, model: Callable[[], nn.Module] = SmallModel) -> nn.Module:
    torch.manual_seed(seed)
    contexts = {"under Init": tiering.zero.Init, "on meta": lambda: torch.device("meta")}
    with contexts.get(how, nullcontext)():
        return model()


def save(directory: Path, tensors: dict[str, Tensor], shards: int = 3) -> Path:
    """A sharded directory as transformers writes it."""
    directory.mkdir(exist_ok=True)
    names, where = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def saved(seed: int = 23, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Values for the model, which ties its head to its embedding."""
    torch.manual_seed(seed)
    model = SmallModel()
    return {name: param.detach().to(dtype) for name, param in model.named_parameters()}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("how", BUILDS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=("none", "cpu", "nvme"))
def test_masters_take_the_precision_of_the_file(
    start: Callable[..., Any], tmp_path: Path, how: str, placement: dict[str, Any]
) -> None:
    stored = saved() | {"norm.weight": torch.rand(48, dtype=torch.float64)}
    weights = save(tmp_path / "weights", stored)
    before = torch.get_rng_state()
    model = build(how)
    after_build = torch.get_rng_state()
    engine = start(model, weights=weights, threshold=100, **placement)
    masters, params = engine.master_state_dict(), engine.state_dict()
    for name, value in stored.items():
        assert torch.equal(masters[name], value.float()), name
        assert params[name].dtype is torch.bfloat16
        assert (params[name].float() - value).abs().max() <= value.abs().max() * 2**-8, name
    assert torch.equal(torch.get_rng_state(), after_build), "initialisers ran for nothing"
    assert how == "on meta" or not torch.equal(before, after_build)
    assert trained(engine) == trained(start(loaded_in_memory(stored), threshold=100))


def loaded_in_memory(stored: dict[str, Tensor]) -> nn.Module:
    model = build("in memory")
    model.load_state_dict(stored | {"head.weight": stored["embedding.weight"]})
    return model


def trained(engine: Any) -> list[float]:
    """Losses of two steps, and a sum over the masters after them."""
    losses = []
    for tokens, targets in batches(4):
        loss = engine(tokens, targets)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return [*losses, *(value.double().sum().item() for value in engine.master_state_dict().values())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_file_of_another_precision(start: Callable[..., Any], tmp_path: Path, dtype: torch.dtype) -> None:
    stored = saved(dtype=dtype)
    engine = start(build("under Init"), weights=save(tmp_path / "weights", stored), **STREAMED)
    for name, value in engine.master_state_dict().items():
        assert torch.equal(value, stored[name].float()), name


def test_what_is_missing_keeps_the_values_of_the_model(start: Callable[..., Any], tmp_path: Path) -> None:
    stored = saved()
    left_out = stored.pop("blocks.1.up.weight")
    stored["blocks.9.up.weight"] = left_out
    weights = save(tmp_path / "weights", stored)
    for how in BUILDS[:2]:
        model = build(how)
        with pytest.raises(WeightsError, match=r"blocks\.1\.up\.weight"):
            start(model, weights=weights)
        engine = start(model, weights=weights, strict=False)
        masters = engine.master_state_dict()
        expected = build("in memory").state_dict()["blocks.1.up.weight"]
        assert torch.equal(masters["blocks.1.up.weight"], expected)
        assert torch.equal(masters["blocks.0.up.weight"], stored["blocks.0.up.weight"])


class Counting(nn.Module):
    """With buffers: one that is saved, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).float().pow(2).mean()


@pytest.mark.parametrize("how", BUILDS)
def test_buffers_are_loaded_too(start: Callable[..., Any], tmp_path: Path, how: str) -> None:
    source = Counting()
    source.norm.running_mean.normal_()
    source.norm.num_batches_tracked.fill_(7)
    weights = save(tmp_path / "weights", source.state_dict())
    engine = start(build(how, model=Counting), weights=weights, threshold=10, precision="fp32", **STREAMED)
    assert torch.equal(engine.module.norm.running_mean, source.norm.running_mean)
    assert engine.module.norm.num_batches_tracked == 7
    assert torch.equal(engine.master_state_dict()["layers.1.weight"], source.layers[1].weight.detach())
    engine.backward(engine(torch.ones(4, 32)))


def test_a_file_that_shrinks_while_it_is_loaded(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file; no swap space and no descriptor is left, and the model can be tried again."""
    weights = save(tmp_path / "weights", saved())
    shard = weights / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    model = build("under Init")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    run = fill.Fill.run

    def cut_first(self: Any, *arguments: Any, **options: Any) -> None:
        shard.write_bytes(content[: len(content) // 2])
        run(self, *arguments, **options)

    monkeypatch.setattr(fill.Fill, "run", cut_first)
    with pytest.raises((WeightsError, SwapError), match=shard.name):
        start(model, weights=weights, **STREAMED)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    monkeypatch.setattr(fill.Fill, "run", run)
    shard.write_bytes(content)
    engine = start(model, weights=weights, **STREAMED)
    assert torch.equal(engine.master_state_dict()["embedding.weight"], saved()["embedding.weight"])


def test_a_failed_start_on_meta_can_be_tried_again(start: Callable[..., Any], tmp_path: Path) -> None:
    stored = saved()
    weights = save(tmp_path / "weights", stored | {"norm.weight": torch.rand(47)})
    model = build("on meta")
    with pytest.raises(WeightsError, match=r"norm\.weight"):
        start(model, weights=weights)
    assert all(param.is_meta for param in model.parameters())
    engine = start(model, weights=save(tmp_path / "whole", stored))
    assert torch.equal(engine.master_state_dict()["norm.weight"], stored["norm.weight"])


def test_no_parameter_is_ever_whole_in_memory(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values pass in ranges, however large a parameter is; what Init recorded is not made where a file has it."""
    monkeypatch.setattr(fill, "RANGE", 500)
    sizes, copy = [], fill.copy_values
    monkeypatch.setattr(fill, "copy_values", lambda v, out: (sizes.append(v.numel()), copy(v, out)))
    monkeypatch.setattr(tape.Tape, "replay", lambda *_: pytest.fail("made for nothing"))
    weights = save(tmp_path / "weights", saved())
    start(build("under Init"), weights=weights, precision="fp32", **STREAMED)
    assert max(sizes) <= 500
    assert sum(sizes) >= sum(value.numel() for value in saved().values())
