"""What the engine saves for others: transformers and peft load it, and have the weights that were trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

import tiering
from tiering.cli import main

from .architectures import ARCHITECTURES, batches, build
from .conftest import COMPUTE, Habit, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

ON_NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
HUB = [name for name in ARCHITECTURES if name not in ("lora", "mixture", "untied")]


@pytest.fixture
def trained(start: Callable[..., Any]) -> Callable[..., Any]:
    """``trained(name, precision)`` is an engine after a step, all on NVMe."""

    def train(name: str, precision: str = "bf16") -> Any:
        engine = start(name, Habit(precision, 1), threshold=0, **ON_NVME)
        engine.backward(engine(**next(batches(name, 1, COMPUTE[precision]))).loss)
        engine.step()
        return engine

    return train


@pytest.fixture
def start_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``start_model(model)`` is an engine of it."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    with ExitStack() as engines:

        def start(model: Any, **keywords: Any) -> Any:
            config = settings(tmp_path, Habit("bf16", 1))
            return engines.enter_context(tiering.initialize(model=model, config=config, **keywords).engine)

        yield start


def assert_same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype and loaded[name].equal(value), name


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", HUB)
def test_files_are_those_that_transformers_writes_and_it_loads_them(
    trained: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    engine = trained(name)
    ours, theirs = engine.save_pretrained(tmp_path / "ours"), tmp_path / "theirs"
    loaded = type(engine.module).from_pretrained(ours)
    assert_same(loaded.state_dict(), engine.state_dict())
    assert loaded.dtype == torch.bfloat16
    loaded.save_pretrained(theirs)
    assert {each.name for each in ours.iterdir()} == {each.name for each in theirs.iterdir()}
    assert_same(load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors"))
    for file in theirs.glob("*.json"):
        assert json.loads((ours / file.name).read_text()) == json.loads(file.read_text())


def test_shards_are_no_longer_than_asked_and_indexed(trained: Callable[..., Any], tmp_path: Path) -> None:
    engine = trained("mixtral")
    place = engine.save_pretrained(tmp_path / "saved", max_shard_size=40_000)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    shards = sorted(place.glob("model-*.safetensors"))
    assert len(shards) > 2 and {shard.name for shard in shards} == set(index["weight_map"].values())
    stored = {shard: load_file(shard) for shard in shards}
    sizes = [[value.nbytes for value in tensors.values()] for tensors in stored.values()]
    assert all(sum(each) <= 40_000 or len(each) == 1 for each in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    for shard, tensors in stored.items():
        assert all(index["weight_map"][tensor] == shard.name for tensor in tensors)
    loaded = hf.AutoModelForCausalLM.from_pretrained(place)
    assert_same(loaded.state_dict(), engine.state_dict())


def convert(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def test_what_is_saved_starts_another_run(
    trained: Callable[..., Any], start_model: Callable[..., Any], tmp_path: Path
) -> None:
    """As its weights, and as a checkpoint; experts are stored one by one."""
    engine = trained("mixtral")
    place = engine.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    other = start_model(build("mixtral", seed=4), weights=place)
    assert_same(other.state_dict(), engine.state_dict())
    convert(place, tmp_path / "checkpoints")
    third = start_model(build("mixtral", seed=5))
    path, client_state = third.load_checkpoint(tmp_path / "checkpoints")
    assert (path, client_state) == (str(tmp_path / "checkpoints" / "global_step0"), {})
    assert_same(third.state_dict(), engine.state_dict())


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "bert", "lora", "mixture"])
def test_a_checkpoint_is_converted_to_what_the_engine_has(
    trained: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """In fp32 its masters, in bf16 what it computes with; frozen parameters, too."""
    engine = trained(name)
    engine.save_checkpoint(tmp_path / "checkpoints")
    convert(tmp_path / "checkpoints", tmp_path / "fp32")
    convert(tmp_path / "checkpoints", tmp_path / "bf16", "--dtype", "bf16")
    names = dict(engine.module.named_parameters())
    weights = {key: value for key, value in engine.state_dict().items() if key in names}
    masters = {key: value.float() for key, value in weights.items()} | engine.master_state_dict()
    assert_same(load_file(tmp_path / "fp32" / "model.safetensors"), masters)
    assert_same(load_file(tmp_path / "bf16" / "model.safetensors"), weights)
    assert any(not value.float().equal(masters[key]) for key, value in weights.items())


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "bert"])
def test_with_its_config_a_converted_checkpoint_is_loaded_by_transformers(
    trained: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    engine = trained(name)
    engine.save_checkpoint(tmp_path / "checkpoints")
    engine.module.config.save_pretrained(tmp_path / "config")
    out = tmp_path / "out"
    convert(tmp_path / "checkpoints", out, "--dtype", "bf16", "--config", tmp_path / "config")
    loaded = type(engine.module).from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert_same(loaded.state_dict(), engine.state_dict())


def test_an_adapter_is_saved_as_peft_saves_it(trained: Callable[..., Any], tmp_path: Path) -> None:
    import peft  # takes seconds, which only those pay who run this

    engine = trained("lora")
    place = engine.save_pretrained(tmp_path / "ours")
    plain = build("lora").to(torch.bfloat16)
    plain.load_state_dict(engine.state_dict())
    plain.save_pretrained(tmp_path / "theirs")
    assert_same(
        load_file(place / "adapter_model.safetensors"),
        load_file(tmp_path / "theirs" / "adapter_model.safetensors"),
    )
    configs = [json.loads((tmp_path / of / "adapter_config.json").read_text()) for of in ("ours", "theirs")]
    for config in configs:
        config["target_modules"].sort()  # a set, in the order of the process
    assert configs[0] == configs[1]
    base = hf.LlamaForCausalLM(plain.get_base_model().config).to(torch.bfloat16)
    loaded = peft.PeftModel.from_pretrained(base, place)
    adapters = {name: value for name, value in engine.state_dict().items() if "lora_" in name}
    assert len(adapters) == 8
    in_fp32 = loaded.state_dict()  # as peft takes what is to be trained
    assert_same({name: in_fp32[name].bfloat16() for name in adapters}, adapters)


def test_an_adapter_of_a_transformers_model_is_saved_as_transformers_saves_it(
    start_model: Callable[..., Any], tmp_path: Path
) -> None:
    import peft  # as above

    model = build("llama")
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    engine = start_model(model)
    place = engine.save_pretrained(tmp_path / "ours")
    plain = build("llama").to(torch.bfloat16)
    plain.load_adapter(place)
    plain.save_pretrained(tmp_path / "theirs")
    stored = [load_file(tmp_path / of / "adapter_model.safetensors") for of in ("ours", "theirs")]
    assert stored[0].keys() == stored[1].keys() and len(stored[0]) == 4
    for name, value in stored[0].items():
        assert value.equal(stored[1][name].to(torch.bfloat16)), name


CODE = """
import torch
from transformers import PreTrainedModel, PretrainedConfig
class OwnConfig(PretrainedConfig):
    model_type = "own"
class Own(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.up = torch.nn.Linear(4, 4)
        self.post_init()
"""


def test_code_of_the_models_own_comes_along(
    start_model: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    import own_model

    own_model.OwnConfig.register_for_auto_class()
    own_model.Own.register_for_auto_class("AutoModel")
    engine = start_model(own_model.Own(own_model.OwnConfig()))
    place = engine.save_pretrained(tmp_path / "saved")
    assert (place / "own_model.py").read_text() == CODE
    loaded = hf.AutoModel.from_pretrained(place, trust_remote_code=True)
    assert_same(loaded.state_dict(), engine.state_dict())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["mixture", "untied"])
def test_of_other_models_the_weights_are_written(
    trained: Callable[..., Any], tmp_path: Path, name: str, precision: str
) -> None:
    engine = trained(name, precision)
    engine.save_pretrained(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "saved/model.safetensors"), engine.state_dict())
