"""Planning from a transformers configuration: what describes no model is refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiering.errors import ConfigError
from tiering.planning.adapters import Adapters
from zero3.setup.plan_for import described, plan_for


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"model_type": "llama", "hidden_size": 63}', "hidden size"),
        ('{"model_type": "llama", "vocab_size": "many"}', "expected int"),
        ('{"model_type": "resnet"}', "ResNetConfig"),
    ],
)
def test_a_configuration_that_does_not_hold_together(tmp_path: Path, text: str, why: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"describes no model that transformers .*{why}") as refusal:
        described(tmp_path)
    assert len(str(refusal.value)) < 500


def test_frozen_weights_beside_a_configuration_are_planned_in_place(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, vocab_size=100, num_key_value_heads=4)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    directory, nvme = tmp_path / "model", tmp_path / "nvme"
    nvme.mkdir()
    model.save_pretrained(directory)
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    settings = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 0},
        "tiering": {"cache_in_host": False, "device_budget": "4MiB", "host_budget": "4MiB"},
    }
    arguments = {"model": directory, "config": settings, "adapters": Adapters(rank=4)}
    report = plan_for(**arguments)
    assert report.plan is not None
    frozen = sum(param.nbytes for param in model.parameters())
    assert frozen <= report.plan.in_place_bytes < 1.2 * frozen
    assert report.as_dict()["plan"]["in_place"] == report.plan.in_place_bytes
    assert "read in place" in str(report) and "Frozen parameters take" not in str(report)
    (directory / "model.safetensors").unlink()
    copied = plan_for(**arguments)
    assert copied.plan is not None and copied.plan.in_place_bytes == 0
    assert "of swap space. They take none if the files" in " ".join(str(copied).split())
