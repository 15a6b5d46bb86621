"""Sizes and hyperparameters of the demo: one record, which each worker receives as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any


class Way(StrEnum):
    """How a worker trains. All use equal seeds and batches.

    NVME    the engine, with parameters and optimizer state on NVMe
    MEMORY  the engine, with all state in memory
    PLAIN   a PyTorch loop without the engine
    """

    NVME = "nvme"
    MEMORY = "memory"
    PLAIN = "plain"


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and its batches, and hyperparameters of the optimizer. The defaults give 25.6 M parameters.

    ``precision`` is bf16 or fp32, of the model in all ways.
    """

    steps: int = 20
    micro_batch: int = 2
    accumulation: int = 2
    sequence: int = 256
    width: int = 512
    layers: int = 8
    heads: int = 8
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 1234
    precision: str = "bf16"
    host_budget: str = "160MiB"
    device_budget: str = "64MiB"
    sample_bytes: int = 64

    def in_fp32(self) -> Settings:
        """For CPUs without instructions for bf16. Unsharded groups take twice the memory."""
        return replace(self, precision="fp32", device_budget="128MiB")

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.sequence

    def config(self, way: Way, directory: Path, run_name: str) -> dict[str, Any]:
        """The DeepSpeed configuration that trains this ``way``."""
        home = {"device": "nvme", "nvme_path": str(directory)} if way is Way.NVME else {"device": "none"}
        tight = {"host_budget": self.host_budget, "device_budget": self.device_budget, "cache_in_host": False}
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.precision == "bf16"},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self.lr,
                    "betas": list(self.betas),
                    "eps": self.eps,
                    "weight_decay": self.weight_decay,
                },
            },
            "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home},
            "tiering": {"run_name": run_name} | (tight if way is Way.NVME else {}),
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**fields | {"betas": tuple(fields["betas"])})
