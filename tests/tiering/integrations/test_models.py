"""Models for a Trainer on the engine: adapters, encoders with decoders, models without memory, other modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Seq2SeqTrainer,
    SiglipConfig,
    SiglipModel,
)

import tiering

from .trainers import (
    PLACES,
    TieredSeq2SeqTrainer,
    config,
    differences,
    different,
    llama,
    sentences,
    seq2seq,
    state,
    stock,
    tiered,
)

# transformers renames what peft calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")


def lora(seed: int = 3, **options: Any) -> Any:
    model = llama(seed)
    torch.manual_seed(seed + 1)
    settings = LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    )
    return get_peft_model(model, settings)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("place", PLACES)
def test_an_adapter_trains_saves_and_resumes(place: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    plain = stock(tmp_path / "stock", lora(), **options)
    plain.train()
    settings = config(place, tmp_path)
    trainer = tiered(tmp_path / "out", settings, lora(), **options)
    trainer.train()
    assert list(differences(trainer, plain, 1e-6)) == []
    expected = state(trainer)
    # peft's own files, and peft loads them onto a base model.
    folders = [path / "checkpoint-6" for path in (tmp_path / "out", tmp_path / "stock")]
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)
    loaded = PeftModel.from_pretrained(llama(), folders[0])
    values = trainer.engine.state_dict()
    adapters = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    assert len(adapters) == 8
    assert all(value.equal(values[name]) for name, value in adapters.items())
    # In the same process, as notebooks do; the base model is not in the checkpoint.
    again = tiered(tmp_path / "out", settings, lora(), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-3"))
    assert different(state(again), expected) == []
    again.engine.close()
    trainer.engine.close()


def test_several_adapters_are_saved_as_peft_does(tmp_path: Path) -> None:
    model = lora()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), model)
    trainer.train()
    trainer.save_model(str(tmp_path / "ours"))
    values = trainer.engine.state_dict()
    restored = PeftModel.from_pretrained(llama(), tmp_path / "ours")
    restored.load_adapter(tmp_path / "ours/other", "other")
    adapters = {name: value for name, value in restored.state_dict().items() if "lora" in name}
    assert len(adapters) == 12
    assert all(value.equal(values[name]) for name, value in adapters.items())
    trainer.engine.close()


@pytest.mark.parametrize("place", PLACES)
def test_predictions_are_generated(place: str, tmp_path: Path) -> None:
    made = ((Seq2SeqTrainer, {}), (TieredSeq2SeqTrainer, {"tiering_config": config(place, tmp_path)}))
    trainers, predictions = [], []
    for cls, options in made:
        trainers.append(seq2seq(cls, tmp_path / "out", **options))
        trainers[-1].train()
        predictions.append(trainers[-1].predict(sentences(4, seed=9)).predictions)
    assert list(differences(trainers[1], trainers[0], 1e-6)) == []
    assert len(predictions[0]) == 4
    assert np.array_equal(*predictions)
    trainers[1].engine.close()


class Regression(nn.Module):
    """A model of nobody's library."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([2.0]))

    def forward(self, input_x: Tensor, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        y = input_x * self.a + self.b
        return (y,) if labels is None else (nn.functional.mse_loss(y, labels), y)


def test_a_model_of_another_library_trains_and_is_saved(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 64)
    data = [{"input_x": value, "labels": 3 * value + 0.5} for value in x]
    trainers = [stock(tmp_path / "stock", Regression(), train_dataset=data, learning_rate=0.1)]
    trainers[0].train()
    settings = config("cpu", tmp_path)
    trainers.append(tiered(tmp_path / "out", settings, Regression(), train_dataset=data, learning_rate=0.1))
    trainers[1].train()
    assert list(differences(trainers[1], trainers[0], 1e-6)) == []
    trainers[1].save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model/model.safetensors")
    assert different(saved, trainers[1].engine.master_state_dict()) == []
    trainers[1].engine.close()


def moe() -> Qwen3MoeForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=96, **sizes, **heads))


def tied() -> GPT2LMHeadModel:
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96, **tokens))


def variance_scaled() -> SiglipModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {**sizes, "image_size": 4, "patch_size": 2, "num_channels": 3}
    text = {**sizes, "vocab_size": 64, "max_position_embeddings": 16}
    return SiglipModel(SiglipConfig(text_config=text, vision_config=vision))


BUILDERS = {"llama": llama, "tied": tied, "fused experts": moe, "variance scaled": variance_scaled}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_without_memory_gives_the_bits_of_the_files(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = BUILDERS[name]().to(dtype)
    expected = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path / "files")
    with tiering.zero.Init():
        loaded = type(model).from_pretrained(tmp_path / "files")
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), loaded)
    trainer.save_model()
    assert different(trainer.engine.state_dict(), expected) == []
    trainer.engine.close()
    # The same weights, read by the engine on their way to the tiers.
    with tiering.zero.Init():
        empty = type(model)(AutoConfig.from_pretrained(tmp_path / "files")).to(dtype)
    settings = config("nvme", tmp_path)
    trainer = tiered(tmp_path / "out", settings, empty, tiering_weights=tmp_path / "files")
    trainer.save_model()
    assert different(trainer.engine.state_dict(), expected) == []
    trainer.engine.close()


def test_building_without_memory_gives_the_bits_of_an_ordinary_build(tmp_path: Path) -> None:
    settings = llama().config
    torch.manual_seed(6)
    expected = AutoModelForCausalLM.from_config(settings).state_dict()
    torch.manual_seed(6)
    with tiering.zero.Init():
        model = AutoModelForCausalLM.from_config(settings)
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), model)
    trainer.save_model()
    assert different(trainer.engine.state_dict(), expected) == []
    trainer.engine.close()


class WithHead(LlamaForCausalLM):
    """Has a layer more than ``llama``, with initial values of its own."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.new_head = nn.Linear(32, 96)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is getattr(self, "new_head", None):
            nn.init.constant_(module.weight, -100.0)
            nn.init.constant_(module.bias, 100.0)


def test_parameters_that_the_files_lack_are_initialised(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "files")
    with tiering.zero.Init():
        model = WithHead.from_pretrained(tmp_path / "files")
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), model)
    trainer.save_model()
    values = trainer.engine.state_dict()
    assert (values["new_head.weight"] == -100).all()
    assert (values["new_head.bias"] == 100).all()
    trainer.engine.close()


@pytest.mark.parametrize("built", ["in memory", "without memory"])
def test_token_embeddings_are_resized_before_training(built: str, tmp_path: Path) -> None:
    plain = llama()
    plain.resize_token_embeddings(106, mean_resizing=False)
    with tiering.zero.Init(enabled=built == "without memory"):
        model = llama()
        model.resize_token_embeddings(106, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape == (106, 32)
    trainer = tiered(tmp_path / "out", config("nvme", tmp_path), model)
    trainer.train()
    values, before = trainer.engine.state_dict(), plain.state_dict()
    assert values["lm_head.weight"].shape == (106, 32)
    # A token that the data lack has only decayed.
    assert torch.allclose(
        values["model.embed_tokens.weight"][1], before["model.embed_tokens.weight"][1], rtol=1e-2
    )
    trainer.engine.close()
