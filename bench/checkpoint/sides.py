"""The sides by name."""

from __future__ import annotations

from .scale import Scale
from .side import SavingSpec

NVME = "ours, NVMe"
RAM = "ours, in RAM"
TORCH = "torch.save"
DCP = "torch.distributed.checkpoint"
MMAP = "mmap=True"
RANKS = 2


def on_nvme(scale: Scale, ranks: int = 1) -> SavingSpec:
    """Parameters and optimizer state on NVMe, nothing of them cached."""
    budgets = {"cache_in_host": False, "host_budget": scale.host, "device_budget": ranks * scale.device}
    name = NVME if ranks == 1 else f"{NVME}, {ranks} ranks"
    settings = {"tiering": budgets}
    return SavingSpec(name, "checkpoint.ours", scale.model, settings, on_disk=True, ranks=ranks)


def in_memory(scale: Scale) -> SavingSpec:
    """Everything on the device tier, which on a CPU is RAM; budgets are left to the engine."""
    return SavingSpec(RAM, "checkpoint.ours", scale.model, {"tiering": {}})


def torch_save(scale: Scale) -> SavingSpec:
    return SavingSpec(TORCH, "checkpoint.torch_save", scale.model, loads={"": {}, MMAP: {"mmap": True}})


def torch_dcp(scale: Scale) -> SavingSpec:
    return SavingSpec(DCP, "checkpoint.torch_dcp", scale.model)
