"""What a plan is made for: ranks and their devices, how they train, and by which configuration if none is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tiering.config import ds_config
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.placement.budgets import AUTO_SHARE, NVME_SHARE
from tiering.placement.plan import Workload
from tiering.planning.profiles import Profile
from tiering.planning.rates import Rates
from tiering.text import counted

TOKENS = 4096  # of a micro-batch and rank, unless told

RatesOf = Rates | Callable[[Workload], Rates]
"""Rates, or what makes them of a Workload, as ``profiles.PROFILES["a100"].rates`` does."""


@dataclass(frozen=True)
class Setting:
    """Ranks, how many of them are on a node, their GPUs, and what they train with.

    ``gpu_memory``: bytes of each rank's GPU, None where the CPU is the device. ``tokens``: of a micro-batch and rank,
    in sequences of ``sequence`` (None: in one); how long they are matters to attention alone. ``checkpointed``:
    backward computes the forward again. ``endurance``: bytes that may be written to the node's drives in their life (a
    drive's TBW x 10^12, of all together).
    """

    world_size: int = 1
    local_size: int = 1
    gpu_memory: int | None = None
    tokens: int = TOKENS
    sequence: int | None = None
    checkpointed: bool = False
    endurance: float | None = None

    def attention_flops(self, layers: int, hidden: int) -> float:
        """Operations per token of a forward between tokens: scores and their sums over, on average, half a sequence."""
        return 2.0 * layers * hidden * (self.tokens if self.sequence is None else self.sequence)

    def __post_init__(self) -> None:
        if min(self.world_size, self.local_size) < 1 or self.world_size % self.local_size:
            raise ConfigError(
                f"{counted(self.world_size, 'rank')} cannot be {self.local_size} on each node: world_size has to be"
                " a multiple of ranks_per_node, and both at least 1"
            )
        for name in ("tokens", "sequence", "gpu_memory", "endurance"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; it has to be above 0")


def usual_config(directory: Path, *, world_size: int = 1) -> TieringConfig:
    """bf16 with AdamW in stage 3, where all that memory has no room for may go to NVMe, in ``directory``."""
    offload = {"device": "nvme", "nvme_path": str(directory)}
    config, _ = ds_config.load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        },
        world_size=world_size,
    )
    return config


def profile_budgets(profile: Profile) -> dict[str, int]:
    """The shares of a node's memory and drives that "auto" takes where nothing else runs."""
    return {
        "host_budget": int(profile.host_bytes * AUTO_SHARE),
        "nvme_budget": int(profile.nvme_bytes * NVME_SHARE),
    }


def with_changes(
    config: TieringConfig, *, micro_batches: int | None = None, tiers: Mapping[str, object]
) -> TieringConfig:
    """``config`` with other keys of the ``tiering`` block, and so many micro-batches in a step.

    Raises ConfigError for what does not go together.
    """
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["tiering"] = values.get("tiering", {}) | tiers
    if micro_batches is not None:
        values["gradient_accumulation_steps"] = micro_batches
        values["train_batch_size"] = config.micro_batch_size * micro_batches * config.world_size
    try:
        return TieringConfig.model_validate(values)
    except ValidationError as problems:
        told = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
            for each in problems.errors()
        ]
        raise ConfigError("; ".join(told)) from problems
