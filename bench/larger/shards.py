"""A model's parameters as a Hugging Face style directory of safetensors, written one at a time.

The safetensors package takes all tensors of a file at once; here as much memory is needed as the largest parameter has.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import tiering

if TYPE_CHECKING:
    from torch import nn

BF16 = 2
Named = dict[str, "nn.Parameter"]


def write(model: nn.Module, directory: Path, shard_bytes: int = 1 << 30) -> int:
    """Write the parameters of a model that an engine trains in bf16, tied ones once. Returns the files' bytes."""
    shards = list(_cut(dict(model.named_parameters()), shard_bytes))
    names: dict[str, str] = {}
    nbytes = 0
    for number, shard in enumerate(shards, start=1):
        path = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with path.open("wb") as file:
            _write_shard(shard, file)
            nbytes += file.tell()
            file.flush()
            os.fsync(file.fileno())
            # The next reader must not find the file in the page cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        names |= dict.fromkeys(shard, path.name)
    total = sum(parameter.numel() * BF16 for shard in shards for parameter in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return nbytes


def _cut(parameters: Named, shard_bytes: int) -> Iterator[Named]:
    """Runs of parameters of at most ``shard_bytes`` together, or one that is larger."""
    shard: Named = {}
    room = shard_bytes
    for name, parameter in parameters.items():
        nbytes = parameter.numel() * BF16
        if shard and nbytes > room:
            yield shard
            shard, room = {}, shard_bytes
        shard[name] = parameter
        room -= nbytes
    yield shard


def _write_shard(shard: Named, file: BinaryIO) -> None:
    import torch

    header, end = {}, 0
    for name, parameter in shard.items():
        begin, end = end, end + parameter.numel() * BF16
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start on a multiple of eight
    file.write(len(text).to_bytes(8, "little") + text)
    for parameter in shard.values():
        with tiering.gathered(parameter):
            file.write(parameter.detach().bfloat16().contiguous().view(torch.uint8).numpy().data)
