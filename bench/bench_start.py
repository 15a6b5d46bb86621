"""The start of a run over a frozen base on NVMe: the base read in place, and the base copied to swap space first.

    python bench/bench_start.py DIR [--layers 22] [--tokens 32] [--steps 3] [--host-budget 256MiB] [--shards 4]

Writes the base, a Llama-shaped model with random weights in bf16 (1.1 B parameters with 22 layers), to DIR as shards of
safetensors, unless it is there already. Each side trains adapters over it in a process of its own: the model is built
without memory, and everything frozen lives on NVMe. Seconds count from the call of ``initialize`` on, after imports.
**one pass** is the time of reading the files once, as the engine reads them, in the same process afterwards.

The base must be unchanged at the end, and both sides must have the same losses. Speeds of shared machines swing within
minutes: compare figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tiering.config.training import IoConfig
from tiering.placement.workload import Tier
from tiering.weights.files import open_weights
from tiering.weights.reader import WINDOW_BYTES, WeightReader

WIDTH, INNER, HEADS, KEYS, VOCABULARY, RANK = 2048, 5632, 32, 4, 32_000, 16
SIDES = {"in place": True, "copied": False}


class Adapted(nn.Module):
    """A frozen linear layer, and an adapter of rank 16."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) * 0.02)
        self.b = nn.Parameter(torch.randn(outputs, RANK) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + functional.linear(functional.linear(x, self.a), self.b)
        return output


class Block(nn.Module):
    """Grouped-query attention and a gated layer, as in Llama, without rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        side = WIDTH // HEADS * KEYS
        self.q, self.k, self.v, self.o = (
            Adapted(WIDTH, outputs) for outputs in (WIDTH, side, side, WIDTH)
        )  # fmt: skip
        self.gate, self.up, self.down = (
            Adapted(WIDTH, INNER),
            Adapted(WIDTH, INNER),
            Adapted(INNER, WIDTH),
        )
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, stream: Tensor) -> Tensor:
        x = self.norms[0](stream)
        q, k, v = (
            values.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for values in (self.q(x), self.k(x), self.v(x))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        stream = stream + self.o(mixed.transpose(1, 2).flatten(2))
        x = self.norms[1](stream)
        hidden: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return stream + hidden


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def shapes_of(layers: int) -> dict[str, torch.Size]:
    """The tensors of the base, in the order of their names."""
    with torch.device("meta"):
        params = Model(layers).named_parameters()
    return {name: param.shape for name, param in sorted(params) if not param.requires_grad}


def write_base(directory: Path, layers: int, shards: int) -> None:
    """Shards with an index, written tensor by tensor in the order of the names, as hubs have them."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shapes = shapes_of(layers)
    names, where = list(shapes), dict[str, str]()
    generator = torch.Generator().manual_seed(1)
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        values = {
            name: (torch.randn(shapes[name], generator=generator) * 0.02).bfloat16() for name in part
        }  # fmt: skip
        save_file(values, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    os.sync()


def config(directory: Path, options: argparse.Namespace, *, in_place: bool) -> dict[str, Any]:
    swap = directory / "swap"
    swap.mkdir(exist_ok=True)
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "tiering": {
            "device_budget": options.device_budget,
            "host_budget": options.host_budget,
            "weights_in_place": in_place,
            "telemetry": {"enabled": False},
        },
    }


def train(directory: Path, options: argparse.Namespace, *, in_place: bool) -> dict[str, Any]:
    """One side: the figures of its start and of its steps."""
    torch.manual_seed(2)
    with tiering.zero.Init():
        model = Model(options.layers)
    rows = [torch.randint(VOCABULARY, (1, options.tokens)) for _ in range(options.steps)]
    # The name imports the engine.
    initialize = tiering.initialize
    began = time.perf_counter()
    engine, *_ = initialize(
        model=model,
        config=config(directory, options, in_place=in_place),
        weights=directory / "base",
        strict=False,
    )
    initialized = time.perf_counter()
    losses, ends, read = [], [], []
    for tokens in rows:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        ends.append(time.perf_counter())
        read.append(sum(path.read.bytes for path in engine.snapshot().io))
    figures = {
        "initialize": initialized - began,
        "first step": ends[0] - initialized,
        "step": min(end - begin for begin, end in pairwise(ends)) if len(ends) > 1 else 0.0,
        "start": ends[0] - began,
        "losses": losses,
        "planned read": engine.plan.nvme_traffic()[0],
        "read": read[-1] - read[-2] if len(read) > 1 else read[0],
        "in place": engine.plan.in_place_bytes,
        "swap": engine.plan.contents(Tier.NVME).get("parameters", 0),
        "written": sum(path.written.bytes for path in engine.snapshot().io),
        "peak RSS": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    engine.close()
    return figures | {"one pass": one_pass(directory / "base")}


def one_pass(base: Path) -> float:
    """Seconds to read the files once through the I/O engine."""
    files = open_weights(base)
    began = time.perf_counter()
    with WeightReader(files, IoConfig(), files.tensors.values()) as reader:
        for tensor in files.tensors.values():
            for first in range(0, tensor.numel, WINDOW_BYTES // tensor.itemsize):
                reader.read(tensor, first, min(WINDOW_BYTES // tensor.itemsize, tensor.numel - first))
    return time.perf_counter() - began


def versions(base: Path) -> list[tuple[str, int, int]]:
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(base.iterdir())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--device-budget", default="768MiB")
    parser.add_argument("--host-budget", default="256MiB")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        figures = train(options.directory, options, in_place=SIDES[options.side])
        print(json.dumps(figures))
        return 0
    base = options.directory / "base"
    write_base(base, options.layers, options.shards)
    before = versions(base)
    results = {}
    for side in SIDES:
        command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.stderr.write(run.stderr)
            return 2
        results[side] = json.loads(run.stdout.splitlines()[-1])
    for name, value in results["in place"].items():
        other = results["copied"][name]
        if name == "losses":
            print(f"{name:14} {'equal' if value == other else f'{value} and {other}'}")
            continue
        texts = (
            f"{each:10.2f} s" if isinstance(each, float) else f"{each / 1e6:9,.1f} MB"
            for each in (value, other)
        )
        print(f"{name:14} " + "  ".join(f"{side} {text}" for side, text in zip(SIDES, texts, strict=True)))
    return (
        0 if versions(base) == before and results["in place"]["losses"] == results["copied"]["losses"] else 1
    )


if __name__ == "__main__":
    sys.exit(main())
