"""Models of transformers with many experts: training of adapters, and generation, with experts on NVMe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import tiering
from tests.zero3.inside import wait_for_transfers
from zero3.building.quantized_experts import QuantizedExperts

EXPERTS, WIDTH, LAYERS = 64, 64, 2
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=WIDTH, num_experts=EXPERTS),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=EXPERTS, layer_types=["full_attention"] * LAYERS),
}


def build(name: str, implementation: str) -> Any:
    """The model with attention's last layer to train, and routers that choose other experts for each token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        CONFIGS[name], experts_implementation=implementation, dtype=torch.bfloat16
    )
    for param_name, param in model.named_parameters():
        trains = param_name.endswith("o_proj.weight")
        param.requires_grad_(trains)
        if param_name.endswith((".gate.weight", ".router.weight")):
            nn.init.normal_(param)
    return model


def begin(
    model: nn.Module,
    place: str,
    path: Path,
    prefetch: int = 1,
    weights: str | None = None,
    weights_in_place: bool = False,
) -> Any:
    section = {"device": "nvme", "nvme_path": str(path)} if place == "nvme" else {"device": "none"}
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": section,
            "stage3_prefetch_bucket_size": prefetch,
            "stage3_param_persistence_threshold": 600,
        },
        "tiering": {
            "device_budget": "16MiB",
            "host_budget": "16MiB",
            "telemetry": {"enabled": False},
            "cache_in_host": False,
            "weights_in_place": weights_in_place,
        },
    }
    return tiering.initialize(model=model, config=settings, weights=weights).engine


def outcome(engine: Any) -> tuple[list[float], list[list[int]], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        tokens = torch.randint(128, (2, 40), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    prompt = torch.randint(128, (1, 4), generator=generator)
    written = engine.module.generate(
        prompt, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return losses, written.tolist(), engine.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_training_and_generation_have_the_same_bits_with_experts_on_nvme(
    name: str, implementation: str, checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    results = []
    for place, prefetch in (("device", 1), ("nvme", 0), ("nvme", 10**6)):
        model = build(name, implementation)
        if checkpointed:
            model.activation_checkpointing_enable()
        engine = begin(model, place, tmp_path, prefetch)
        fused = [group for group in engine._groups if group.slices]
        assert len(fused) == (LAYERS if place == "nvme" else 0)
        results.append(outcome(engine))
        engine.close()
    for losses, written, weights in results[1:]:
        assert losses == results[0][0]
        assert written == results[0][1]
        assert [key for key in weights if not torch.equal(weights[key], results[0][2][key])] == []


@pytest.mark.slow
def test_a_generated_token_reads_two_of_64_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    engine = begin(build("mixtral", "grouped_mm"), "nvme", tmp_path)

    def read_bytes() -> int:
        wait_for_transfers(engine)
        return sum(path.read.bytes for path in engine.snapshot().io)

    def write(count: int) -> None:
        engine.module.generate(
            torch.tensor([[5]]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )

    engine.eval()
    write(4)
    before = read_bytes()
    write(4)
    middle = read_bytes()
    write(14)
    experts = sum(group.layout.numel * 2 for group in engine._groups if group.slices)
    dense = sum(group.layout.numel * 2 for group in engine._groups if group.moves and not group.slices)
    token = dense + experts * 2 // EXPERTS
    assert middle - before == 4 * token
    assert read_bytes() - middle == 14 * token
    assert experts == LAYERS * EXPERTS * 3 * WIDTH * WIDTH * 2
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_in_the_files_of_a_model_are_read_in_place(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have the experts of a layer one by one, or in one tensor; other tensors move them to any byte."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    results = []
    build(name, "grouped_mm").save_pretrained(tmp_path / "model")
    for place, in_place in (("device", False), ("nvme", False), ("nvme", True)):
        with torch.device("meta"):
            model = build(name, "grouped_mm")
        engine = begin(
            model, place, tmp_path, weights=str(tmp_path / "model"), weights_in_place=in_place, prefetch=0
        )
        fused = [group for group in engine._groups if group.slices]
        assert [group.home.files is not None for group in fused] == [in_place] * (
            LAYERS if place == "nvme" else 0
        )
        results.append(outcome(engine))
        engine.close()
    for losses, written, weights in results[1:]:
        assert losses == results[0][0]
        assert written == results[0][1]
        assert [key for key in weights if not torch.equal(weights[key], results[0][2][key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_quantised_while_they_are_read_and_decoded_if_they_are_routed_to(
    name: str, implementation: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as of a model that is quantised in memory, and on each tier."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    build(name, implementation).save_pretrained(tmp_path / "model")
    results = []
    for place, streamed in (("device", False), ("nvme", True), ("nvme", False)):
        with torch.device("meta" if streamed else "cpu"):
            model = tiering.quantize(build(name, implementation), form)
        weights = str(tmp_path / "model") if streamed else None
        engine = begin(model, place, tmp_path, weights=weights)
        assert len([group for group in engine._groups if group.slices]) == (LAYERS if place == "nvme" else 0)
        results.append(outcome(engine))
        engine.close()
    for losses, written, values in results[1:]:
        assert losses == results[0][0]
        assert written == results[0][1]
        assert [key for key in values if not torch.equal(values[key], results[0][2][key])] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_of_quantised_experts_is_loaded_by_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the names of its files, which have the experts of a layer one by one, or in one tensor."""
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    model = tiering.quantize(build(name, "grouped_mm"), "nf4")
    expected = {
        f"{path}.{matrices}": getattr(module, matrices).whole().to(torch.bfloat16)
        for path, module in model.named_modules()
        if isinstance(module, QuantizedExperts)
        for matrices in module.matrices
    }
    engine = begin(model, "nvme", tmp_path)
    engine.save_pretrained(tmp_path / "export")
    engine.close()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert len(expected) == 2 * LAYERS
    assert [
        each for each, value in expected.items() if not torch.equal(loaded.get_parameter(each), value)
    ] == []
