"""Adapters of peft over quantised bases: what they may be, every placement, habits of training, reference passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiering
from tests.zero3.conftest import same_bits
from tiering.errors import ConfigError
from zero3.building import fill, quantization
from zero3.building.quantized_linear import QuantizedLinear
from zero3.checkpoint import export

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*is deprecated:FutureWarning"  # peft 0.21
)


def llama() -> Any:
    import transformers as hf

    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes))


def adapted(base: Any, name: str, **lora: Any) -> Any:
    """``base`` quantised, with adapters of peft."""
    import peft

    base.requires_grad_(False)
    tiering.quantize(base, name)
    assert isinstance(base.model.layers[0].mlp.up_proj, QuantizedLinear) and type(base.lm_head) is nn.Linear
    return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **lora))


def plain_base() -> Any:
    return llama().requires_grad_(False)


BASES: dict[str, Callable[[], Any]] = {
    "fp32": plain_base,
    "nf4": lambda: tiering.quantize(plain_base(), "nf4"),
    "int8": lambda: tiering.quantize(plain_base(), "int8"),
    "fp8": lambda: tiering.quantize(plain_base(), "fp8"),
}
every_base = pytest.mark.parametrize(
    "base", ["nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in BASES if name != "nf4")]
)


def tuned(base: str) -> Any:
    """``base`` with adapters that have an effect."""
    import peft

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(BASES[base](), lora)


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(seed))


def step(engine: Any, count: int = 2) -> list[float]:
    """Losses of ``count`` updates."""
    losses = []
    for number in range(count * engine.settings.gradient_accumulation_steps):
        loss = engine(input_ids=tokens(number), labels=tokens(number)).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@every_base
def test_without_its_adapters_the_model_is_the_base(start: Callable[..., Any], base: str) -> None:
    """As DPO and GRPO take their reference from the model that they train."""
    with torch.no_grad():
        expected = BASES[base]()(input_ids=tokens(9)).logits
    for placement in PLACEMENTS:
        engine = start(tuned(base), precision="fp32", accumulation=1, threshold=0, **placement)
        step(engine, 1)
        with torch.no_grad():
            with engine.adapters_disabled():
                reference = engine(input_ids=tokens(9)).logits
            assert torch.equal(reference, expected)
            assert not torch.equal(engine(input_ids=tokens(9)).logits, expected)
        # The pass has no effect on the steps around it.
        other = start(tuned(base), precision="fp32", accumulation=1, threshold=0, **placement)
        step(other, 1)
        assert step(engine, 1) == step(other, 1)
        assert same_bits(engine.master_state_dict(), other.master_state_dict()) == []


HABITS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "activation checkpointing": {},
    "bf16": {"precision": "bf16"},
    "split state": {"precision": "bf16", "state": "split"},
    "step in backward": {"step_in_backward": True, "clip": 0.0},
    "stage 0": {"stage": 0},
    "generate": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("habit", HABITS)
def test_no_habit_and_no_placement_changes_a_bit(start: Callable[..., Any], base: str, habit: str) -> None:
    results = []
    options = {"precision": "fp32", "accumulation": 1, "threshold": 0} | HABITS[habit]
    for placement in PLACEMENTS[:1] if habit == "stage 0" else PLACEMENTS:
        model = tuned(base)
        if habit == "activation checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = start(model, **options, **placement)
        losses = step(engine)
        made = tokens(3)
        if habit == "generate":
            with torch.no_grad():
                made = engine.module.generate(input_ids=tokens(3), max_new_tokens=4, do_sample=False)
        results.append((losses, made, engine.master_state_dict()))
        frozen = {name: value for name, value in engine.state_dict().items() if name.endswith("_scales")}
        assert same_bits({name: model.state_dict()[name] for name in frozen}, frozen) == []
    for losses, made, masters in results:
        assert losses == results[0][0] and len({*losses}) == len(losses)
        assert torch.equal(made, results[0][1]) and same_bits(masters, results[0][2]) == []


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_a_run_goes_on_at_another_placement(start: Callable[..., Any], tmp_path: Path, base: str) -> None:
    options = {"precision": "fp32", "accumulation": 1, "threshold": 0}
    engine = start(tuned(base), **options, **PLACEMENTS[1])
    step(engine)
    engine.save_checkpoint(tmp_path)
    saved, after = engine.state_dict(), step(engine)
    torch.manual_seed(77)
    other = start(tuned(base), **options, **PLACEMENTS[0])
    other.load_checkpoint(tmp_path)
    assert same_bits(other.state_dict(), saved) == []
    assert step(other) == after
    assert same_bits(other.state_dict(), engine.state_dict()) == []


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_an_adapter_is_saved_alone(start: Callable[..., Any], tmp_path: Path, base: str) -> None:
    import peft

    engine = start(tuned(base), precision="fp32", accumulation=1, threshold=0, **PLACEMENTS[1])
    step(engine)
    engine.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = engine(input_ids=tokens(9)).logits
        loaded = peft.PeftModel.from_pretrained(BASES[base](), tmp_path)
        assert torch.equal(loaded(input_ids=tokens(9)).logits, expected)


def test_the_base_below_adapters_is_quantised_and_adapters_are_not() -> None:
    import peft

    adapters = peft.LoraConfig(r=64, target_modules="all-linear")
    base, other = llama(), llama()
    quantised = adapted(base, "int8")
    tuned = peft.get_peft_model(other, adapters)
    tuned.requires_grad_(False)  # as a reference model has them
    assert tiering.quantize(tuned, "int8") is tuned
    layers = {name for name, module in tuned.named_modules() if isinstance(module, QuantizedLinear)}
    assert layers == {
        name for name, module in quantised.named_modules() if isinstance(module, QuantizedLinear)
    }
    assert len(layers) == 14 and all(name.endswith("base_layer") for name in layers)
    tiering.quantize(tuned, "int8", modules="q_proj")  # they already are


@pytest.mark.parametrize(("name", "options"), [("Lora", {"use_dora": True}), ("HRA", {})])
def test_adapters_that_would_read_codes_are_refused(
    start: Callable[..., Any], name: str, options: dict[str, Any]
) -> None:
    import peft

    def with_adapters(*quantised: str) -> Any:
        settings = getattr(peft, f"{name}Config")(target_modules=["q_proj"], **options)
        model = peft.get_peft_model(llama().requires_grad_(False), settings)
        return tiering.quantize(model, "int8", modules=quantised)

    expected = "DoRA" if options else "HRA"
    with pytest.raises(
        ConfigError, match=rf"the {expected} adapter 'default' may.* codes in int8.*\(modules\)"
    ):
        start(with_adapters("q_proj", "up_proj"))
    start(with_adapters("up_proj"))


ADAPTERS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "BOFT": {"boft_block_size": 16},
    "C3A": {"block_size": 16},
    "IA3": {"feedforward_modules": []},
    "OFT": {"oft_block_size": 16},
    "POLY": {"n_tasks": 2, "r": 4, "task_type": "CAUSAL_LM"},
    "VBLORA": {"vector_length": 32, "num_vectors": 8},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of peft, whose kinds warn of many things
@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("kind", sorted(quantization._APART))
def test_adapters_that_call_the_layer_train_over_codes_as_over_the_decoded_weights(
    start: Callable[..., Any], kind: str, name: str
) -> None:
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    layers = ["q_proj", "down_proj"]
    make = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)]

    def with_adapters(decoded: bool) -> Any:
        base = tiering.quantize(llama().requires_grad_(False), name, modules=layers)
        if decoded:
            plain = llama().requires_grad_(False)
            for path, layer in base.named_modules():
                if isinstance(layer, QuantizedLinear):
                    plain.get_submodule(path).weight.copy_(layer.dequantized_weight())
            base = plain
        torch.manual_seed(2)
        adapters = get_peft_model(base, make(target_modules=layers, **ADAPTERS.get(kind, {})))
        for param in adapters.parameters():
            if param.requires_grad:
                with torch.no_grad():  # first values with which the adapter has an effect
                    param.add_(torch.randn_like(param) * 0.05)
        return adapters.eval()  # no dropout

    runs = []
    for decoded, placement in ((True, PLACEMENTS[0]), (False, PLACEMENTS[0]), (False, PLACEMENTS[1])):
        engine = start(with_adapters(decoded), precision="fp32", accumulation=1, threshold=0, **placement)
        tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(2))
        more = {"task_ids": torch.tensor([0, 1])} if kind == "POLY" else {}
        losses = []
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens, **more).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        runs.append((losses, engine.master_state_dict()))
    (expected, _), (losses, resident), (streamed_losses, streamed) = runs
    assert losses == pytest.approx(expected, rel=1e-5) and len(set(losses)) == 3
    assert streamed_losses == losses
    assert resident.keys() == streamed.keys() and resident
    assert all(torch.equal(resident[name], streamed[name]) for name in resident)


@pytest.mark.parametrize("safe", [False, True])
def test_adapters_cannot_be_merged_into_codes(safe: bool) -> None:
    """Codes of int8 have as many elements as the matrix: their shape is what a merge fails over."""
    tuned = adapted(llama(), "int8", init_lora_weights=False)
    tokens = torch.arange(24).view(2, 12)
    before = tuned(input_ids=tokens).logits
    with pytest.raises(RuntimeError, match=r"size|shape"):
        tuned.merge_adapter(safe_merge=safe)
    assert torch.equal(tuned(input_ids=tokens).logits, before)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("nf4", PLACEMENTS[0]),
        ("nf4", PLACEMENTS[1]),
        pytest.param("int8", PLACEMENTS[1], marks=pytest.mark.slow),
        pytest.param("fp8", PLACEMENTS[1], marks=pytest.mark.slow),
    ],
)
def test_exports_hold_decoded_weights_under_the_names_of_the_model(
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    placement: dict[str, Any],
) -> None:
    monkeypatch.setattr(export, "RANGE", 1000)  # ranges that end inside a block
    base = tiering.quantize(llama().bfloat16().requires_grad_(False), name)
    base.lm_head.requires_grad_(True)
    engine = start(base, precision="bf16", threshold=0, **placement)
    engine.save_pretrained(tmp_path / "pretrained")
    loaded = type(base).from_pretrained(tmp_path / "pretrained", dtype="auto")
    by_name = load_file(engine.save_16bit_model(tmp_path / "16bit"))
    engine.release()
    expected = {
        path: layer.dequantized_weight(torch.bfloat16)
        for path, layer in base.named_modules()
        if isinstance(layer, QuantizedLinear)
    }
    assert len(expected) == 14
    for path, weight in expected.items():
        assert torch.equal(loaded.get_submodule(path).weight, weight)
    assert by_name.keys() == llama().state_dict().keys()
    assert all(torch.equal(by_name[key], value) for key, value in loaded.state_dict().items())


@pytest.mark.parametrize(
    "name", ["nf4", pytest.param("int8", marks=pytest.mark.slow), pytest.param("fp8", marks=pytest.mark.slow)]
)
def test_placement_does_not_change_adapters_over_a_quantised_base(
    start: Callable[..., Any], name: str
) -> None:
    results = []
    for placement in PLACEMENTS:
        tuned = adapted(llama().bfloat16(), name, init_lora_weights=False)
        layer = tuned.base_model.model.model.layers[1].self_attn.q_proj
        assert type(layer).__module__.startswith("peft") and isinstance(layer.base_layer, QuantizedLinear)
        trained = [each for each, param in tuned.named_parameters() if param.requires_grad]
        assert len(trained) == 2 * 2 * 7 and all("lora_" in each for each in trained)
        engine = start(tuned, precision="bf16", accumulation=1, threshold=0, **placement)
        tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(2))
        losses = []
        for _ in range(3):
            loss = engine(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        results.append((losses, engine.state_dict()))
    (losses, resident), (other_losses, streamed) = results
    assert losses == other_losses and losses[-1] < losses[0]
    assert resident.keys() == streamed.keys()
    assert all(torch.equal(resident[key], streamed[key]) for key in resident)
    codes = [key for key in resident if key.endswith("base_layer.weight")]
    expected = adapted(llama().bfloat16(), name, init_lora_weights=False).state_dict()
    assert len(codes) == 14 and all(torch.equal(resident[key], expected[key]) for key in codes)


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_a_base_on_meta_is_encoded_while_its_weights_stream_in(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(fill, "RANGE", 1000)  # ranges that end inside a block
    stored = llama().bfloat16()
    save_file(stored.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = llama()
    tuned = adapted(empty, name)
    assert all(param.is_meta for param in tuned.parameters())
    engine = start(tuned, weights=tmp_path, precision="bf16", threshold=0, **PLACEMENTS[1])
    values = engine.state_dict()
    expected = adapted(stored, name).state_dict()
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[key], expected[key]) for key in expected if "lora_" not in key)
    for key in (key for key in expected if "lora_" in key):
        width = values[key].shape[1]
        if "lora_B" in key:
            assert not values[key].any()  # as peft starts it, so that the first output is the base's
        else:
            assert 0 < values[key].abs().max() <= width**-0.5 and values[key].std() > 0.4 * width**-0.5
