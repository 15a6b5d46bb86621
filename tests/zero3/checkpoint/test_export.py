"""Weights for others, out of a live engine: the same bits, whole files or none, and no parameter in memory at once."""

from __future__ import annotations

import errno
import itertools
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

import tiering
import tiering.weights.tensor_file
import zero3.checkpoint.export
from optim_cpu.formats import round_parameters
from tests.zero3.conftest import NVME_STATE, SmallModel, batches, config, same_bits
from tests.zero3.inside import staging_is_empty
from tiering.errors import CheckpointError, ConfigError, SwapError
from tiering.storage.arena import Lease
from tiering.storage.swap_space import SwapSpace
from tiering.storage.tickets import Ticket
from tiering.weights.files import open_weights
from zero3.checkpoint.saved_names import own_names, transformers_names
from zero3.state.tensors import TieredState

STREAMED = {**NVME_STATE, "cache_in_host": False}


def step(engine: Any, count: int = 1) -> None:
    for tokens, targets in batches(count * engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()


@pytest.fixture
def engine(start: Callable[..., Any]) -> Any:
    engine = start(**STREAMED)
    step(engine)
    return engine


def untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name != "head.weight"}


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What a disk does that is full: the kernel refuses to let a file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_of_16_bits_is_saved_as_it_computes(engine: Any, tmp_path: Path) -> None:
    path = engine.save_16bit_model(tmp_path / "out")
    assert path == tmp_path / "out" / "model.safetensors"
    assert same_bits(load_file(path), untied(engine.state_dict())) == []
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    model = SmallModel().to(torch.bfloat16)
    load_model(model, path)
    assert same_bits(model.state_dict(), engine.state_dict()) == []


@pytest.mark.parametrize(("fp16", "dtype"), [(False, torch.bfloat16), (True, torch.float16)])
def test_a_model_in_fp32_is_rounded_to_16_bits(
    nvme: Path, tmp_path: Path, fp16: bool, dtype: torch.dtype
) -> None:
    settings = config(nvme, precision="fp32", **STREAMED)
    settings["torch_autocast"] = {"enabled": fp16, "dtype": "float16"}
    with tiering.initialize(model=SmallModel(), config=settings).engine as engine:
        saved = load_file(engine.save_16bit_model(tmp_path))
        expected = {}
        for name, value in untied(engine.state_dict()).items():
            expected[name] = torch.empty_like(value, dtype=dtype)
            round_parameters(value, expected[name])
    assert same_bits(saved, expected) == []


def test_frozen_parameters_may_be_left_out(start: Callable[..., Any], tmp_path: Path) -> None:
    model = SmallModel()
    model.position.requires_grad_(False)
    engine = start(model)
    everything = load_file(engine.save_16bit_model(tmp_path / "all"))
    trained = load_file(engine.save_16bit_model(tmp_path / "trained", "model.safetensors", True))
    assert everything.keys() - trained.keys() == {"position.weight"}
    assert same_bits(trained, {name: everything[name] for name in trained}) == []


@pytest.mark.parametrize(
    ("name", "written"),
    [("pytorch_model.bin", "model.safetensors"), ("last.1.pt", "last.1.safetensors"), ("a.safetensors", "")],
)
def test_a_name_of_a_pickle_gives_safetensors(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, written: str
) -> None:
    path = engine.save_16bit_model(tmp_path / "out", name)
    assert path == tmp_path / "out" / (written or name)
    assert load_file(path).keys() == load_file(engine.save_16bit_model(tmp_path)).keys()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.startswith(f"{path} was written instead of {name}") for line in warnings] == [True] * bool(
        written
    )


@pytest.mark.parametrize("name", ["model", ".safetensors", ".bin", "a/model.safetensors", "model.onnx", ""])
def test_other_names_are_refused(engine: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"not the name of a \.safetensors file.*use model\.saf"):
        engine.save_16bit_model(tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


class WithBuffers(nn.Module):
    """Buffers of several dtypes, one of which is shared and one not saved; an odd number of elements before int64."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("same", self.mask)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("ramp", torch.arange(3), persistent=False)


def test_buffers_are_saved_as_they_are(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(WithBuffers())
    path = engine.save_16bit_model(tmp_path)
    expected = engine.state_dict()
    del expected["same"]
    assert same_bits(load_file(path), expected) == []
    files = open_weights(path)
    assert {"I64", "BF16", "BOOL", "F32"} == {stored.dtype for stored in files.tensors.values()}
    assert all(stored.offset % stored.itemsize == 0 for stored in files.tensors.values())
    assert files.metadata == {"format": "pt"}


def test_no_more_than_a_range_is_in_memory(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = TieredState.weight_ranges

    def record(*arguments: Any) -> Iterator[Tensor]:
        for values in original(*arguments):
            sizes.append(values.numel())
            yield values

    monkeypatch.setattr(zero3.checkpoint.export, "RANGE", 5000)
    monkeypatch.setattr(TieredState, "weight_ranges", record)
    saved = load_file(engine.save_16bit_model(tmp_path))
    assert 2048 <= max(sizes) <= 5000 and sum(sizes) == sum(value.numel() for value in saved.values())
    monkeypatch.undo()
    assert same_bits(saved, untied(engine.state_dict())) == []


@pytest.mark.parametrize("promised", [True, False])
def test_a_full_disk_leaves_nothing_behind_and_training_goes_on(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, promised: bool
) -> None:
    """``promised``: whether the file system says at once that there is no room, or only when it is used up."""
    if not promised:
        monkeypatch.setattr(tiering.weights.tensor_file, "_reserve", lambda fd, nbytes: None)
    engine, other = start(**STREAMED), start(**STREAMED)
    step(engine), step(other)
    content = engine.save_16bit_model(tmp_path / "out").read_bytes()
    step(engine), step(other)
    # These reads wait for all writes, which the limit would refuse.
    (engine.state_dict(), engine.master_state_dict())
    for where in ("out", "new/deep"):
        with files_of_at_most(64 << 10), pytest.raises(CheckpointError, match=r"EFBIG.*ulimit"):
            engine.save_16bit_model(tmp_path / where)
        assert staging_is_empty(engine)
    assert not (tmp_path / "new").exists()
    assert {each.name: each.read_bytes() for each in (tmp_path / "out").iterdir()} == {
        "model.safetensors": content
    }
    step(engine), step(other)
    assert same_bits(engine.master_state_dict(), other.master_state_dict()) == []


class Failed:
    """A read that ends with an error."""

    def __init__(self, read: Ticket) -> None:
        self._read = read

    def done(self) -> bool:
        return self._read.done()

    def wait(self, timeout: float | None = None) -> int:
        self._read.wait()
        raise SwapError("a read failed", errno=errno.EIO, filename="swap", offset=0)


@pytest.mark.parametrize("submitted", [True, False])
def test_a_read_that_fails_ends_the_export_and_gives_all_room_back(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: bool
) -> None:
    """The second of those that are on their way together."""
    count = itertools.count(1)
    swap_in = SwapSpace.swap_in

    def fail_once(swap: SwapSpace, *arguments: Any, **options: Any) -> Any:
        if next(count) != 4:
            return swap_in(swap, *arguments, **options)
        if not submitted:
            raise SwapError("no read was begun", errno=errno.EIO, filename="swap", offset=0)
        return Failed(swap_in(swap, *arguments, **options))

    monkeypatch.setattr(zero3.checkpoint.export, "RANGE", 2048)
    monkeypatch.setattr(SwapSpace, "swap_in", fail_once)
    with pytest.raises(SwapError):
        engine.save_16bit_model(tmp_path / "out")
    assert next(count) > 4 and not (tmp_path / "out").exists()
    assert staging_is_empty(engine)
    saved = load_file(engine.save_16bit_model(tmp_path / "out"))
    assert same_bits(saved, untied(engine.state_dict())) == []


def test_an_interrupt_at_the_release_of_a_range_ends_the_export_and_gives_all_room_back(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may raise as soon as the range was released: it is not released a second time."""
    count, release = itertools.count(1), Lease.release

    def interrupted_once(lease: Lease) -> None:
        of_staging = lease.arena is engine._tiers.staging
        release(lease)
        if of_staging and next(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(zero3.checkpoint.export, "RANGE", 2048)
    monkeypatch.setattr(Lease, "release", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        engine.save_16bit_model(tmp_path / "out")
    assert next(count) > 2 and not (tmp_path / "out").exists()
    assert staging_is_empty(engine)


def llama(**options: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(sizes | {"vocab_size": 100} | options)))


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def test_a_later_save_replaces_what_an_earlier_one_left(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start(llama())
    (tmp_path / "tokenizer.json").write_text("{}")
    engine.save_pretrained(tmp_path, max_shard_size="16KB")
    many = names(tmp_path)
    assert len(many) > 5
    engine.save_pretrained(tmp_path)
    whole = {"tokenizer.json", "config.json", "generation_config.json", "model.safetensors"}
    assert names(tmp_path) - {"nvme"} == whole
    engine.save_pretrained(tmp_path, max_shard_size="16KB")
    assert names(tmp_path) == many


@pytest.mark.parametrize("first", ["16KB", "1GB"])
def test_what_is_killed_between_two_renames_is_no_mixture(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """After each of them there is nothing to begin with, or all of it is of one save."""
    engine = start(llama())
    place = tmp_path / "out"
    engine.save_pretrained(place, max_shard_size=first)
    old = engine.state_dict()
    engine.set_fp32_parameter("lm_head.weight", torch.ones(100, 32))
    engine.set_fp32_parameter("model.embed_tokens.weight", torch.ones(100, 32))
    new = engine.state_dict()
    outcomes = []
    replace = Path.replace

    def look(path: Path, target: Path) -> Path:
        result = replace(path, target)
        if not {"model.safetensors", "model.safetensors.index.json"} & names(place):
            outcomes.append("nothing")
        else:
            loaded = hf.LlamaForCausalLM.from_pretrained(place).state_dict()
            outcomes.append({True: "old", False: "new"}[same_bits(loaded, old) == []])
            assert same_bits(loaded, new if outcomes[-1] == "new" else old) == []
        return result

    monkeypatch.setattr(Path, "replace", look)
    engine.save_pretrained(place, max_shard_size="16KB")
    assert outcomes[-1] == "new" and set(outcomes[:-1]) == {"nothing"}


def test_a_bad_size_is_refused(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_size: unknown unit 'XB'"):
        engine.save_pretrained(tmp_path, max_shard_size="5XB")


def test_what_transformers_computes_stays_as_it_is_where_that_loads(caplog: pytest.LogCaptureFixture) -> None:
    """Its files have query, key and value in one tensor."""
    model = llama()
    parts = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    model._weight_conversions = [WeightConverter(["self_attn.qkv.weight"], parts, [Chunk(0)])]
    saved = {each.name for each in transformers_names(model)}
    assert saved == {each.name for each in own_names(model)}
    assert "is saved as it is in the model (3 such tensors)" in caplog.text


def test_what_would_not_load_as_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one name before and after it is transposed: loading would transpose once more."""
    model = llama()
    step = WeightConverter(["mlp.up_proj.weight"], ["mlp.up_proj.weight"], [Transpose(0, 1)])
    model._weight_conversions = [step]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [step])
    with pytest.raises(ConfigError, match=r"computes.*'model.layers.0.mlp.up_proj.weight'.*save_16bit_model"):
        transformers_names(model)


def test_two_names_of_one_tensor_that_nobody_ties_are_both_saved() -> None:
    """transformers would initialise anew what it finds under neither name."""
    model = llama()
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    saved = {each.name: each for each in own_names(model)}
    first, two = (saved[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("up", "gate"))
    assert first.tensor is two.tensor and saved.keys() == model.state_dict().keys()


def test_what_is_no_tensor_is_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Extra(2, 2)
    assert [each.name for each in own_names(model)] == ["weight", "bias"]
    assert "'_extra_state' is not a tensor and is not saved (dict)" in caplog.text
