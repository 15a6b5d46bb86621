"""Layers of tiles in the ways in which models are trained, and in files of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import SEQUENCE, SmallModel, batches
from tests.zero3.plain import STREAMED
from zero3.engine.engine import Engine
from zero3.passes import moved_activations

Start = Callable[..., Engine]
TILE = 8 << 10


class Checkpointed(SmallModel):
    """Its blocks recompute. ``rows``: of a chunk of head and loss."""

    reentrant: bool | None = None
    rows: int = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.position(torch.arange(SEQUENCE))
        for block in self.blocks:
            stream = (
                block(stream)
                if self.reentrant is None
                else checkpoint(block, stream, use_reentrant=self.reentrant)
            )
        stream = self.norm(stream)
        if self.rows:
            return tiering.chunked_cross_entropy(stream, self.head, targets, rows=self.rows)
        return functional.cross_entropy(self.head(stream).float().flatten(0, 1), targets.flatten())


def trained(
    start: Start, *, reentrant: bool | None = None, rows: int = 0, **options: Any
) -> dict[str, Tensor]:
    """The masters after two steps in tiles."""
    torch.manual_seed(3)
    model = Checkpointed()
    model.reentrant, model.rows = reentrant, rows
    # fp32, which compute in bf16 halves.
    tiering.tile(model, 2 * TILE)
    engine = start(model, threshold=0, **options)
    for tokens, targets in batches(2 * engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    masters = engine.master_state_dict()
    engine.close()
    return masters


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("way", "placed"),
    [
        ({"reentrant": True}, {}),
        ({"reentrant": False}, {}),
        ({"rows": 8}, {}),
        ({"block_rows": 1}, {}),
        ({}, {"activations": "host", "activation_budget": 1 << 16}),
        ({"reentrant": False}, {"activations": "nvme", "activation_budget": 1 << 16}),
    ],
    ids=str,
)
def test_no_placement_changes_a_bit(
    start: Start, way: dict[str, Any], placed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 256)
    expected = trained(start, **way)
    found = trained(start, **way, **placed, **STREAMED)
    assert found.keys() == expected.keys() and "embedding.weight" in found
    assert [name for name, values in expected.items() if not torch.equal(found[name], values)] == []


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_was_saved(start: Start, tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=600, tie_word_embeddings=tied, **sizes)
    )
    engine = start(model, threshold=0, tile=TILE, **STREAMED)
    for tokens, _ in batches(engine.settings.gradient_accumulation_steps):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_pretrained(tmp_path)
    assert any("tiles" in name for name, _ in model.named_parameters())
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    state = engine.state_dict()
    assert loaded.keys() == state.keys()
    assert [name for name, values in state.items() if not torch.equal(loaded[name], values)] == []


def test_an_adapter_has_whole_modules_to_save(start: Start, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def base() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(48, 192), nn.Tanh(), nn.Linear(192, 600, bias=False))

    adapted = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    engine = start(adapted, threshold=0, tile=TILE, **STREAMED)
    for _ in range(engine.settings.gradient_accumulation_steps):
        engine.backward(engine(torch.randn(2, 48).bfloat16()).float().square().mean())
        engine.step()
    engine.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tuple(values.shape) for name, values in names.items()} == {
        "base_model.model.0.lora_A.weight": (2, 48),
        "base_model.model.0.lora_B.weight": (192, 2),
        "base_model.model.2.weight": (600, 192),
    }
    again = peft.PeftModel.from_pretrained(base(), tmp_path)
    whole = again.get_parameter("base_model.model.2.modules_to_save.default.weight")
    trained_head = engine.state_dict()["base_model.model.2.modules_to_save.default.weight"]
    assert torch.equal(whole.bfloat16(), trained_head)
    assert not torch.equal(trained_head, base()[2].weight.bfloat16())
