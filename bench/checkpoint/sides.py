"""The sides by name."""

from __future__ import annotations

from .scale import Scale
from .side import Spec

NVME = "ours, NVMe"
RAM = "ours, in RAM"
TORCH = "torch.save"
DCP = "torch.distributed.checkpoint"
MMAP = "mmap=True"
RANKS = 2


def on_nvme(scale: Scale, ranks: int = 1) -> Spec:
    """Parameters and optimizer state on NVMe, nothing of them cached."""
    budgets = {"cache_in_host": False, "host_budget": scale.host, "device_budget": ranks * scale.device}
    name = NVME if ranks == 1 else f"{NVME}, {ranks} ranks"
    return Spec(name, "ours", scale.work, ranks, {"tiering": budgets})


def in_memory(scale: Scale) -> Spec:
    """Everything on the device tier, which on a CPU is RAM; budgets are left to the engine."""
    return Spec(RAM, "ours", scale.work, 1, {"directory": None, "tiering": {}})


def torch_save(scale: Scale) -> Spec:
    return Spec(TORCH, "torch_save", scale.work, 1, loads={"": {}, MMAP: {"mmap": True}})


def torch_dcp(scale: Scale) -> Spec:
    return Spec(DCP, "torch_dcp", scale.work, 1)
