"""The setting of a plan: ranks, devices, batch sizes, and the default configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tiering._text import counted
from tiering.config import ds_config
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from tiering.placement.budgets import AUTO_SHARE, NVME_SHARE
from tiering.placement.workload import Workload
from tiering.planning.profiles import Profile
from tiering.planning.rates import Rates

# Default tokens per micro-batch and rank.
TOKENS = 4096
# Tokens whose loss `tiering.chunked_cross_entropy` computes at a time.
LOSS_CHUNK = 1024

RatesOf = Rates | Callable[[Workload], Rates]
"""Rates, or a function from a Workload to Rates, such as ``profiles.PROFILES["a100"].rates``."""


@dataclass(frozen=True)
class Setting:
    """The number of ranks, of ranks per node, their GPUs and batch sizes.

    ``gpu_memory``: bytes of each rank's GPU, None if the CPU is the device. ``tokens``: per micro-batch and rank,
    in sequences of ``sequence`` tokens (None: one sequence); the sequence length only changes the cost of attention.
    ``checkpointed``: backward repeats the forward. ``block_rows``: sequences that a block computes at a time (None:
    all). ``loss_chunk``: tokens whose loss is computed at a time; 0: all.
    ``endurance``: bytes that may be written to all drives of the node in their life (TBW x 10^12).
    ``elsewhere``: the nodes are not this machine. Budgets of their memory and drives that nobody gives have no limit
    then: the plan says what they need.
    """

    world_size: int = 1
    local_size: int = 1
    gpu_memory: int | None = None
    tokens: int = TOKENS
    sequence: int | None = None
    checkpointed: bool = False
    loss_chunk: int = 0
    endurance: float | None = None
    block_rows: int | None = None
    elsewhere: bool = False

    def following(self, config: TieringConfig) -> Setting:
        """The same with the chunks of rows of ``config``, which checkpoint the blocks."""
        rows = config.tiering.block_rows
        return self if rows is None else replace(self, block_rows=rows, checkpointed=True)

    @property
    def tokens_of_block(self) -> int:
        """Tokens that a block computes at a time."""
        if self.block_rows is None or self.sequence is None:
            return self.tokens
        return min(self.tokens, self.block_rows * self.sequence)

    @property
    def chunks(self) -> int:
        """The number of parts in which a block computes a micro-batch."""
        return -(-self.tokens // self.tokens_of_block)

    def attention_flops(self, layers: int, hidden: int) -> float:
        """Operations per token of attention scores and sums in a forward, over half a sequence on average."""
        return 2.0 * layers * hidden * (self.tokens if self.sequence is None else self.sequence)

    def __post_init__(self) -> None:
        if min(self.world_size, self.local_size) < 1 or self.world_size % self.local_size:
            raise ConfigError(
                f"{counted(self.world_size, 'rank')} with {self.local_size} per node is not possible: world_size must"
                " be a multiple of ranks_per_node, and both at least 1"
            )
        for name in ("tokens", "sequence", "gpu_memory", "endurance"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        if self.sequence is not None and self.sequence > self.tokens:
            raise ConfigError(
                f"a micro-batch of {self.tokens:,} tokens has no sequence of {self.sequence:,}; give more tokens, or a"
                " shorter sequence"
            )


def usual_file(directory: Path, dtype: str = "bf16") -> dict[str, Any]:
    """A ds_config.json with AdamW in stage 3 and ``dtype``, bf16 or fp16.

    State that does not fit in memory goes to NVMe, in ``directory``.
    """
    offload = {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        dtype: {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
    }


def usual_config(directory: Path, *, world_size: int = 1, dtype: str = "bf16") -> TieringConfig:
    """The default configuration: that of ``usual_file``."""
    config, _ = ds_config.load(usual_file(directory, dtype), world_size=world_size)
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

    Raises ConfigError for values that contradict each other.
    """
    values: dict[str, Any] = config.model_dump(exclude_unset=True)
    values["tiering"] = values.get("tiering", {}) | tiers
    if micro_batches is not None:
        values["gradient_accumulation_steps"] = micro_batches
        values["train_batch_size"] = config.micro_batch_size * micro_batches * config.data_ranks
    try:
        return TieringConfig.model_validate(values)
    except ValidationError as problems:
        messages = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
            for each in problems.errors()
        ]
        raise ConfigError("; ".join(messages)) from problems
