"""What the planner is asked here: as a command with its answer in JSON, and of a small model with a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

RATES = [
    "--flops=1T",
    "--nvme-read=4GB/s",
    "--nvme-write=2GB/s",
    "--optimizer=1G",
    "--gradients=8G",
    "--host-copy=10GB/s",
    "--device-link=16GB/s",
]
SMALL = ["--params", "60M", "--device-budget", "100MiB", "--host-budget", "300MiB", "--nvme-budget", "2GiB"]

Plan = Callable[..., tuple[int, str, str]]


def answered(plan: Plan, *arguments: str | Path) -> dict[str, Any]:
    _, out, _ = plan(*arguments, "--json")
    answer: dict[str, Any] = json.loads(out)
    return answer


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().logsumexp(-1).mean()


def configured(directory: Path, *, fits: bool, **tiers: object) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 1000,
            "sub_group_size": 20_000,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "tiering": {
            "device_budget": "1MiB",
            "host_budget": "2MiB" if fits else "64KiB",
            "nvme_budget": "32MiB",
            "io": {"allow_memory_file_system": True},
            **tiers,
        },
    }
