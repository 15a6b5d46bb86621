"""The plugin of axolotl trains on the engine what axolotl trains without it, by a stand-in for axolotl."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from tests.fakes import fake_axolotl
from tiering.errors import ConfigError
from tiering.integrations.transformers import TieringTrainerMixin

from .test_models import lora
from .trainers import PLACES, config, differences, llama, sentences

PLUGIN = "tiering.integrations.axolotl.TieringPlugin"
OPTIONS: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "learning_rate": 1e-3, "report_to": "none"}
OPTIONS |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "no"}
OPTIONS |= {"disable_tqdm": True, "use_cpu": True}


class OtherPlugin(fake_axolotl.BasePlugin):
    """A plugin with a trainer of its own."""

    def get_trainer_cls(self, cfg: Any) -> type[Trainer]:
        return DistillingTrainer


class DistillingTrainer(fake_axolotl.AxolotlTrainer): ...


OTHER = f"{__name__}.OtherPlugin"


@pytest.fixture(autouse=True)
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_axolotl.installed():
        yield


def train(output: Path, model: Callable[[], Any] = llama, **keys: Any) -> Trainer:
    return fake_axolotl.train(model, OPTIONS, sentences(32), output_dir=str(output), **keys)


@pytest.mark.parametrize("place", PLACES)
def test_reports_and_weights(place: str, tmp_path: Path) -> None:
    stock = train(tmp_path / "stock")
    tiered = train(
        tmp_path / "tiered",
        plugins=[PLUGIN],
        tiering_config=config(place, tmp_path),
    )
    assert type(tiered).__mro__[1:3] == (TieringTrainerMixin, fake_axolotl.AxolotlTrainer)
    assert list(differences(tiered, stock, 1e-6)) == []
    assert tiered.bench_data_collator is len
    trained = stock.model.state_dict()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "tiered").state_dict()
    assert saved.keys() == trained.keys()
    for name, values in saved.items():
        torch.testing.assert_close(values, trained[name], rtol=1e-5, atol=1e-6)


def test_the_model_is_loaded_into_host_memory(tmp_path: Path) -> None:
    tiered = train(tmp_path / "out", plugins=[PLUGIN], tiering_config=config("cpu", tmp_path))
    assert tiered.loaded_with_device_map is None


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config("cpu", tmp_path)))
    tiered = train(tmp_path / "out", plugins=[PLUGIN], tiering_config=str(path))
    assert tiered.args.tiering_config == str(path)
    assert tiered.engine.zero_offload_param().device == "cpu"


def test_a_trainer_of_preferences_gets_its_model(tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", rl="dpo")
    tiered = train(tmp_path / "tiered", rl="dpo", plugins=[PLUGIN], tiering_config=config("cpu", tmp_path))
    assert type(tiered).__bases__[1] is fake_axolotl.AxolotlDPOTrainer
    assert list(differences(tiered, stock, 1e-6)) == []


# transformers renames what peft calls.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
def test_an_adapter_is_its_own_reference(tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", lora, rl="dpo")
    settings = config("cpu", tmp_path)
    tiered = train(tmp_path / "tiered", lora, rl="dpo", plugins=[PLUGIN], tiering_config=settings)
    assert list(differences(tiered, stock, 1e-6)) == []
    # The reference has doubled the loss, which is that of the adapter before its first step.
    assert stock.state.log_history[0]["loss"] > 8


@pytest.mark.parametrize(
    ("keys", "base"),
    [
        ({}, fake_axolotl.AxolotlTrainer),
        ({"reward_model": True}, fake_axolotl.AxolotlRewardTrainer),
        ({"process_reward_model": True}, fake_axolotl.AxolotlPRMTrainer),
        ({"trainer_cls": f"{__name__}.DistillingTrainer"}, DistillingTrainer),
        ({"plugins": [PLUGIN, OTHER]}, DistillingTrainer),
    ],
    ids=["causal", "reward", "process", "named", "plugin"],
)
def test_the_trainer_that_axolotl_would_choose(
    keys: dict[str, Any], base: type[Trainer], tmp_path: Path
) -> None:
    settings = config("device", tmp_path)
    tiered = train(tmp_path / "out", **{"plugins": [PLUGIN], "tiering_config": settings} | keys)
    assert isinstance(tiered, TieringTrainerMixin)
    assert type(tiered).__bases__[1] is base
    assert tiered.state.global_step == OPTIONS["max_steps"]


def test_a_plugin_before_that_chooses_the_trainer_is_refused(tmp_path: Path) -> None:
    settings = config("device", tmp_path)
    with pytest.raises(
        ConfigError, match=r"made a DistillingTrainer.* name .*TieringPlugin first in plugins"
    ):
        train(tmp_path / "out", plugins=[OTHER, PLUGIN], tiering_config=settings)


def test_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the key tiering_config in the YAML file"):
        train(tmp_path / "out", plugins=[PLUGIN])


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("deepspeed", "the engine shards"),
        ("fsdp", "the engine shards"),
        ("fsdp_config", "the engine shards"),
        ("qat", "it replaces parameters"),
        ("relora", "it replaces parameters"),
        ("torch_compile", "a compiled model does not see"),
    ],
)
def test_keys_that_do_not_go_with_an_engine(key: str, reason: str, tmp_path: Path) -> None:
    settings = config("device", tmp_path)
    with pytest.raises(ConfigError, match=f"both tiering_config and {key}; remove {key}, because {reason}"):
        train(tmp_path / "out", plugins=[PLUGIN], tiering_config=settings, **{key: "given"})


def test_the_model_cannot_be_saved_elsewhere(tmp_path: Path) -> None:
    tiered = train(tmp_path / "out", plugins=[PLUGIN], tiering_config=config("cpu", tmp_path))
    with pytest.raises(ConfigError, match=r"cannot save the model to elsewhere: .* the files in .*/out have"):
        tiered.model.save_pretrained("elsewhere")


def test_without_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", None)
    with pytest.raises(ImportError, match="needs axolotl; install it as its documentation says"):
        importlib.import_module("tiering.integrations.axolotl")
