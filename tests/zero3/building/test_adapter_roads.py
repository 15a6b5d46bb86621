"""How adapters of peft come to a model: saved ones, several, injected by transformers, heads, experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiering
from tests.zero3.building.test_quantized_adapters import llama, step, tokens
from tiering.errors import CheckpointError, ConfigError, PlacementError
from zero3.building.peft_models import added_names
from zero3.building.quantization import check_adapters
from zero3.building.quantized_linear import QuantizedLinear

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"  # peft 0.21
)
Start = Callable[..., Any]
OPTIONS: dict[str, Any] = {"precision": "fp32", "accumulation": 1, "threshold": 0}


def lora(**options: Any) -> Any:
    import peft

    return peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(9)).logits
    return found


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A base and an adapter that has an effect, as files, and the logits of both together."""
    import peft

    base = llama().requires_grad_(False)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, lora())
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", logits(model)


def on_meta() -> Any:
    with torch.device("meta"):
        return llama().requires_grad_(False)


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter.*")
def test_an_adapter_that_was_loaded_over_meta_is_loaded_again(
    start: Start, saved: tuple[Path, Path, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    import peft

    base, adapter, expected = saved
    model = peft.PeftModel.from_pretrained(on_meta(), adapter, is_trainable=True)
    engine = start(model, weights=base, **OPTIONS)
    assert "starts with new ones, also if it was loaded there" in caplog.text
    assert not torch.equal(logits(engine), expected)
    peft.set_peft_model_state_dict(engine.module, peft.load_peft_weights(str(adapter)))
    assert torch.equal(logits(engine), expected)
    # As trained parameters, with masters of these values.
    masters = engine.master_state_dict()
    assert any(masters[name].any() for name in masters if "lora_B" in name)


def test_another_adapter_keeps_the_values_that_it_was_loaded_with(
    start: Start, saved: tuple[Path, Path, torch.Tensor]
) -> None:
    import peft

    base, adapter, expected = saved
    model = peft.get_peft_model(on_meta(), lora())
    model.load_adapter(adapter, "ref", low_cpu_mem_usage=True)
    engine = start(model, weights=base, **OPTIONS)
    assert not torch.equal(logits(engine), expected)
    engine.module.set_adapter("ref")
    assert torch.equal(logits(engine), expected)


def test_a_layer_that_is_trained_as_a_whole_takes_its_values_from_the_base(
    start: Start, saved: tuple[Path, Path, torch.Tensor]
) -> None:
    import peft

    base, _, _ = saved
    model = peft.get_peft_model(on_meta(), lora(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    engine = start(model, weights=base, **OPTIONS)
    assert torch.equal(logits(engine), logits(llama()))
    step(engine)
    with engine.adapters_disabled():
        assert torch.equal(logits(engine), logits(llama()))


def test_adapters_of_transformers_are_off_and_on_again_with_the_layers_that_are_trained_as_a_whole(
    start: Start,
) -> None:
    model = llama().requires_grad_(False)
    base = logits(model)
    model.add_adapter(lora(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False))
    engine = start(model, **OPTIONS)
    step(engine)
    trained = logits(engine)
    with engine.adapters_disabled():
        assert torch.equal(logits(engine), base)
        with engine.adapters_disabled():
            assert torch.equal(logits(engine), base)
        assert torch.equal(logits(engine), base)
    assert torch.equal(logits(engine), trained)
    head = engine.get_fp32_parameter("lm_head.modules_to_save.default.weight").clone()
    step(engine, 1)
    assert not torch.equal(engine.get_fp32_parameter("lm_head.modules_to_save.default.weight"), head)


def test_adapters_that_were_off_stay_off(start: Start) -> None:
    import peft

    model = peft.get_peft_model(llama().requires_grad_(False), lora(init_lora_weights=False))
    engine = start(model, **OPTIONS)
    with_adapters = logits(engine)
    with engine.module.disable_adapter():
        base = logits(engine)
        with engine.adapters_disabled():
            assert torch.equal(logits(engine), base)
        assert torch.equal(logits(engine), base)
    assert torch.equal(logits(engine), with_adapters)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_frozen_adapters_are_no_layers_of_the_base() -> None:
    model = llama().requires_grad_(False)
    model.add_adapter(lora(r=64), "a")
    model.add_adapter(lora(r=64), "b")
    assert {name.split(".")[-2] for name in added_names(model)} == {"a", "b"}
    tiering.quantize(model.requires_grad_(False), "nf4")
    up = model.model.layers[0].mlp.up_proj
    assert isinstance(up.base_layer, QuantizedLinear)
    assert {type(each) for each in (*up.lora_A.values(), *up.lora_B.values())} == {nn.Linear}


def classifier() -> Any:
    import transformers as hf

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(vocab_size=96, num_key_value_heads=2, num_labels=3, pad_token_id=0, **sizes)
    return hf.LlamaForSequenceClassification(config)


def test_the_head_of_a_classifier_stays_as_it_is(start: Start) -> None:
    """As a reward model: peft trains a copy of it."""
    import peft

    model = tiering.quantize(classifier().requires_grad_(False), "nf4")
    assert type(model.score) is nn.Linear
    adapted = peft.get_peft_model(classifier().requires_grad_(False), lora(task_type="SEQ_CLS"))
    tiering.quantize(adapted, "nf4")
    assert type(adapted.base_model.model.score.original_module) is nn.Linear
    engine = start(peft.get_peft_model(model, lora(task_type="SEQ_CLS")), **OPTIONS)
    loss = engine(input_ids=tokens(0), labels=torch.tensor([0, 2])).loss
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}], ids=str
)
def test_the_output_layer_stays_as_it_is_inside_of_what_peft_puts_around_it(options: dict[str, Any]) -> None:
    import peft

    model = peft.get_peft_model(
        llama().requires_grad_(False), lora(**({"target_modules": ["q_proj"]} | options))
    )
    tiering.quantize(model, "nf4")
    head = model.base_model.model.lm_head
    assert type(head.original_module if "modules_to_save" in options else head.base_layer) is nn.Linear
    check_adapters(model)


def test_names_that_mean_the_same_layer_quantise_it_once() -> None:
    model = llama().requires_grad_(False)
    tiering.quantize(model, "nf4", modules=["q_proj", "self_attn.q_proj"])
    assert isinstance(model.model.layers[1].self_attn.q_proj, QuantizedLinear)


def test_codes_are_not_converted(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    import peft

    model = llama().requires_grad_(False)
    tiering.quantize(model, "nf4", modules=["q_proj"])
    tiering.quantize(model, "nf4", modules=["q_proj"])
    with pytest.raises(
        ConfigError, match=r"q_proj' is in nf4 with blocks of 64.* already, and codes are not"
    ):
        tiering.quantize(model, "int8", modules=["q_proj"])
    model = peft.get_peft_model(model, lora())
    start(model, quantize={"type": "int8"}, **OPTIONS)
    assert "tiering.quantize 'int8': 2 layers in nf4 stay so" in caplog.text


def test_a_refusal_tells_what_has_been_quantised(start: Start) -> None:
    import peft

    model = peft.get_peft_model(llama().requires_grad_(False), lora())
    with pytest.raises(PlacementError) as refused:
        start(model, quantize={"type": "nf4"}, device_budget=1, **OPTIONS)
    assert "14 layers of the model had been quantised by then" in "".join(refused.value.__notes__)


def test_a_checkpoint_without_its_base_is_refused_over_another_format(start: Start, tmp_path: Path) -> None:
    """Codes and scales of int8 and fp8 have one shape."""
    import peft

    def begin(form: str) -> Any:
        base = tiering.quantize(llama().requires_grad_(False), form)
        return start(peft.get_peft_model(base, lora()), **OPTIONS)

    engine = begin("int8")
    engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
    begin("int8").load_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="which it excludes, was I8 and is U8 here; quantise the model"):
        begin("fp8").load_checkpoint(tmp_path / "saved")


def mixture() -> Any:
    import transformers as hf

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.MixtralConfig(vocab_size=96, num_key_value_heads=2, num_local_experts=2, **sizes)
    return hf.MixtralForCausalLM(config).requires_grad_(False)


def test_experts_that_an_adapter_computes_with_are_not_quantised() -> None:
    import peft

    config = lora(target_modules=[], target_parameters=["mlp.experts.gate_up_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(mixture(), config)
    tiering.quantize(model, "nf4")
    check_adapters(model)
    assert model(input_ids=tokens(0)).logits.isfinite().all()
    experts = next(
        module
        for module in model.modules()
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)
    )
    assert experts.gate_up_proj.is_floating_point()
