"""Models that can have Ulysses attention, and what the wrapped attention function gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tiering.errors import ConfigError
from tiering.sequence.batch import shard
from tiering.sequence.registration import Registered, register
from tiering.sequence.ulysses import Ulysses

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL: dict[str, Any] = SIZES | {"vocab_size": 61, "num_key_value_heads": 2}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))


def gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 1}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | changes))


def other(config: str, **changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | changes))


REFUSED: dict[str, tuple[Any, str]] = {
    "heads": (lambda: llama(num_attention_heads=2), "4 ranks .* do not divide the 2 attention heads"),
    "not of transformers": (lambda: nn.Linear(2, 2), "Linear is no model of transformers"),
    "state space": (
        lambda: other("MambaConfig", state_size=4),
        "MambaForCausalLM has layers other than attention",
    ),
    "cross-attention": (lambda: gpt2(add_cross_attention=True), "has an encoder and cross-attention"),
    "its own eager": (
        lambda: gpt2(attn_implementation="eager", reorder_and_upcast_attn=True),
        "computes its attention itself with reorder_and_upcast_attn",
    ),
    "its own attention": (
        lambda: other("BloomConfig", n_head=4),
        "BloomForCausalLM computes its attention itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_divided_is_named(case: str) -> None:
    build, message = REFUSED[case]
    model = build()
    with pytest.raises(ConfigError, match=message):
        register(model, 4)


def test_an_implementation_without_masks_cannot_be_wrapped() -> None:
    model = llama()
    transformers.AttentionInterface.register("without_masks", lambda *_, **__: None)
    model.config._attn_implementation = "without_masks"
    with pytest.raises(ConfigError, match="'without_masks' of LlamaForCausalLM cannot be wrapped"):
        register(model, 2)


def test_a_model_that_numbers_its_positions_is_refused() -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 4}
    settings = transformers.OPTConfig(vocab_size=50, num_hidden_layers=1, **sizes)
    with pytest.raises(
        ConfigError, match=r"numbers positions in its own way \(model.decoder.embed_positions\)"
    ):
        register(transformers.OPTForCausalLM(settings), 2)


def test_the_balance_of_experts_takes_no_mask() -> None:
    model = llama()
    registered = register(model, 2)
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits"):
        registered.make_mask(q_length=4, attention_mask=torch.ones(1, 8))


def test_a_saved_configuration_does_not_name_ulysses() -> None:
    model = llama()
    registered = register(model, 1)
    model.config._attn_implementation = registered.name
    assert "ulysses" not in model.config.to_json_string()
    registered.remove()
    assert model.config._attn_implementation == "sdpa"


def llama_with_another_loss() -> Any:
    model = llama()
    model.loss_function = lambda *_, **__: torch.zeros(())
    return model


@pytest.mark.parametrize(
    ("build", "computes"),
    [(llama, True), (gpt2, True), (llama_with_another_loss, False), (lambda: llama().model, False)],
)
def test_models_that_compute_the_loss_from_shift_labels(build: Any, computes: bool) -> None:
    assert register(build(), 1).computes_loss is computes


def test_a_model_without_a_loss_gets_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Ulysses, "_same_on_all_ranks", lambda self, batch, pad: shard(batch, self.size, self.rank, pad)
    )
    ids = torch.arange(8)[None]
    for model, labels in ((llama(), True), (llama().model, False)):
        ulysses = Ulysses.__new__(Ulysses)
        vars(ulysses).update(size=2, rank=0, _registered=register(model, 2))
        assert ("labels" in ulysses.shard({"input_ids": ids, "labels": ids})) is labels


def test_flash_attention_sees_its_own_name_and_the_heads_of_this_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for a library that needs a GPU."""
    seen: list[Any] = []

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **arguments: Any) -> Any:
        seen.append(
            (module.config._attn_implementation, module.num_key_value_groups, "position_ids" in arguments)
        )
        assert module.is_causal and isinstance(list(module.modules())[1], nn.Linear)
        return query.transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", flash)
    model = llama(num_key_value_heads=1)
    model.config._attn_implementation = "flash_attention_2"
    registered = register(model, 2)
    assert "flash" in registered.name
    # Two ranks of which each has the same tokens, in one process.
    monkeypatch.setattr("tiering.sequence.registration.dist.get_rank", lambda _: 0)
    monkeypatch.setattr(
        "tiering.sequence.registration.tokens_to_heads",
        lambda *tensors, group: tuple(torch.cat([each.chunk(2, dim=1)[0]] * 2, dim=2) for each in tensors),
    )
    monkeypatch.setattr(
        "tiering.sequence.registration.heads_to_tokens",
        lambda output, group: torch.cat([output.chunk(2, dim=1)[0]] * 2, dim=2),
    )
    monkeypatch.setattr("tiering.sequence.registration.dist.get_world_size", lambda _: 2)
    registered.enable(object())  # type: ignore[arg-type]
    model(torch.arange(6)[None], position_ids=torch.arange(6)[None] + 6)
    assert seen == [("flash_attention_2", 2, False)] * 2
    assert isinstance(registered, Registered)
