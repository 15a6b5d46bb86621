"""Llama's shapes by name, and files of random weights for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BF16 = 2
SHARD_BYTES = 1 << 29

SHAPES: dict[str, dict[str, int]] = {
    "10M": {"hidden": 256, "mlp": 704, "blocks": 6, "heads": 4, "kv_heads": 2, "vocabulary": 8000},
    "300M": {"hidden": 1024, "mlp": 2816, "blocks": 20, "heads": 16, "kv_heads": 4, "vocabulary": 32000},
    "1.1B": {"hidden": 2048, "mlp": 5632, "blocks": 22, "heads": 32, "kv_heads": 4, "vocabulary": 32000},
    "3.2B": {"hidden": 3072, "mlp": 8192, "blocks": 30, "heads": 24, "kv_heads": 8, "vocabulary": 32000},
}
"""1.1B is TinyLlama's. 3.2B has the blocks of Llama 3.2 3B, two more of them, and a vocabulary of Llama 2."""


def configuration(name: str, sequence: int) -> dict[str, Any]:
    """What transformers' LlamaConfig takes. Embedding and head are two parameters."""
    shape = SHAPES[name]
    return {
        "vocab_size": shape["vocabulary"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["blocks"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "max_position_embeddings": sequence,
        "tie_word_embeddings": False,
        "use_cache": False,
        "dtype": "bfloat16",
    }


def write(name: str, sequence: int, directory: Path) -> int:
    """Write a model of random bfloat16 weights as Hugging Face does, shard by shard. Returns its parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**configuration(name, sequence), architectures=["LlamaForCausalLM"])
    config.save_pretrained(directory)
    with torch.device("meta"):
        sketch = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    for number, shard in enumerate(_shards(sketch.state_dict())):
        file = f"model-{number:05d}.safetensors"
        values = {key: _values(key, tensor, generator) for key, tensor in shard.items()}
        save_file(values, directory / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return sum(parameter.numel() for parameter in sketch.parameters())


def _values(key: str, tensor: Tensor, generator: Any) -> Tensor:
    import torch

    if key.endswith("norm.weight"):
        return torch.ones(tensor.shape, dtype=torch.bfloat16)
    return torch.empty(tensor.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def _shards(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    nbytes = 0
    for key, tensor in tensors.items():
        if shard and nbytes + tensor.numel() * BF16 > SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
        shard[key] = tensor
        nbytes += tensor.numel() * BF16
    yield shard
