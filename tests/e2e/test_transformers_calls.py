"""What people call on a model of transformers and peft besides its forward, while its state is on NVMe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tiering.errors import ConfigError, EngineStateError, ResidencyError
from tiering.placement.workload import Tier

from .architectures import ARCHITECTURES, batches, build
from .conftest import Habit

# transformers renames what everybody calls, peft among them.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")

HABIT = Habit("bf16", 1)
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
TRAINED = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"


def step(engine: Any, name: str, loss: Callable[[Any], Tensor] = lambda out: out.loss, **inputs: Any) -> None:
    batch = next(batches(name, 1, torch.bfloat16))
    engine.backward(loss(engine(**batch, **inputs)))
    engine.step()


def plain(engine: Any, name: str) -> Any:
    """The model on its own, with the values of now."""
    model = build(name).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.load_state_dict(engine.state_dict())
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_save_pretrained_writes_the_trained_values(
    start: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    engine = start(name, HABIT, **STREAMED)
    before = engine.state_dict()
    step(engine, name)
    engine.module.save_pretrained(tmp_path / "saved")
    restored = type(engine.module).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).state_dict()
    now = engine.state_dict()
    assert [key for key in now if not restored[key].equal(now[key])] == []
    assert any(not before[key].equal(now[key]) for key in now)


def test_an_adapter_is_saved_and_switched_off(start: Callable[..., Any], tmp_path: Path) -> None:
    engine = start("lora", HABIT, **STREAMED)
    for _ in range(2):
        step(engine, "lora")
    engine.module.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    now = engine.state_dict()
    adapters = {key.replace(".default.", "."): value for key, value in now.items() if "lora_" in key}
    assert saved.keys() == adapters.keys()
    assert all(saved[key].equal(adapters[key]) and saved[key].any() for key in saved)
    batch = next(batches("lora", 1))
    model = plain(engine, "lora")
    engine.eval()
    with torch.no_grad():
        adapted = engine(**batch).logits
        before = nvme_read(engine)
        with engine.adapters_disabled(), model.disable_adapter():
            base = engine(**batch).logits
            assert base.equal(model(**batch).logits)
        assert adapted.equal(model(**batch).logits)
        assert not adapted.equal(base)
    # The forward without adapters has read each parameter once.
    assert nvme_read(engine) - before == engine.plan.contents(Tier.NVME)["parameters"]
    engine.train()
    step(engine, "lora")
    assert not engine.state_dict()[TRAINED].equal(now[TRAINED])


def nvme_read(engine: Any) -> int:
    (path,) = engine.snapshot().io
    read: int = path.read.bytes
    return read


def test_a_model_without_adapters_has_none_to_disable(start: Callable[..., Any]) -> None:
    engine = start("llama", HABIT)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has none"):
        engine.adapters_disabled()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_evaluation_in_inference_mode_gives_the_plain_models_loss(
    start: Callable[..., Any], reference: Callable[..., Any], name: str
) -> None:
    engine = start(name, HABIT, **STREAMED)
    step(engine, name)
    batch = next(batches(name, 1, torch.bfloat16))
    with torch.inference_mode():
        assert engine.eval()(**batch).loss.equal(plain(engine, name)(**batch).loss)
    engine.train()
    second = list(batches(name, 2, torch.bfloat16))[1]
    assert engine(**second).loss.item() == reference(name, HABIT).losses[1]


def test_a_cache_carries_over_calls(start: Callable[..., Any]) -> None:
    engine = start("llama", HABIT, **STREAMED)
    step(engine, "llama")
    tokens = next(batches("llama", 1))["input_ids"]

    def in_two(model: Any) -> Tensor:
        with torch.no_grad():
            cache = model(input_ids=tokens[:, :9], use_cache=True).past_key_values
            logits: Tensor = model(input_ids=tokens[:, 9:], past_key_values=cache).logits
        return logits

    assert in_two(engine.eval()).equal(in_two(plain(engine, "llama")))


def test_hidden_states_and_the_backbone_train_to_the_same_bits(start: Callable[..., Any]) -> None:
    """A term on a layer's output; then the backbone and the head called one after the other, not the model."""
    tokens = next(batches("llama", 1))["input_ids"]
    masters = []
    for placement in ({}, STREAMED, {**STREAMED, "prefetch": 0}):
        engine = start("llama", HABIT, **placement)
        step(
            engine,
            "llama",
            lambda out: out.loss + out.hidden_states[1].float().pow(2).mean(),
            output_hidden_states=True,
        )
        hidden = engine.module.model(input_ids=tokens).last_hidden_state
        engine.backward(engine.module.lm_head(hidden).float().logsumexp(-1).mean())
        engine.step()
        masters.append(engine.master_state_dict())
    for other in masters[1:]:
        assert all(masters[0][key].equal(other[key]) for key in masters[0])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_attention_trains_to_the_same_bits(start: Callable[..., Any], attention: str) -> None:
    losses = []
    for placement in ({}, STREAMED):
        engine = start("llama", HABIT, **placement)
        engine.module.set_attn_implementation(attention)
        step(engine, "llama")
        losses.append(engine(**next(batches("llama", 1))).loss.item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "t5"])
def test_tying_again_and_copies_keep_the_ties(start: Callable[..., Any], name: str) -> None:
    engine = start(name, HABIT, **STREAMED)
    count = len(list(engine.module.parameters()))
    engine.module.tie_weights()
    copied = copy.deepcopy(engine.module)
    assert len(list(engine.module.parameters())) == len(list(copied.parameters())) == count
    batch = next(batches(name, 1))
    with torch.no_grad():
        assert copied(**batch).loss.equal(engine(**batch).loss)


def test_what_the_engine_could_not_train_is_refused(start: Callable[..., Any]) -> None:
    engine = start("llama", HABIT, **STREAMED)
    with pytest.raises(ResidencyError, match=r"tiering\.gathered"):
        engine.module.get_input_embeddings().weight.sum()
    with pytest.raises(ResidencyError, match="embed_tokens"):
        engine.module.resize_token_embeddings(310)
    step(engine, "llama")
    resident = start("llama", HABIT)
    resident.module.half()
    with pytest.raises(EngineStateError, match="other memory after initialize"):
        resident(**next(batches("llama", 1)))
