"""What is not asked for at every publication: free room on the tiers, and what torch has of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from tiering.placement.budgets import available_memory
from tiering.placement.plan import Tier
from tiering.storage.swap_file import free_by_file_system
from tiering.telemetry import DeviceMemoryStatus
from zero3.device.tiers import Tiers

INTERVAL = 2.0  # seconds for which an answer is new enough

Answer = TypeVar("Answer")


class Seldom(Generic[Answer]):
    """What ``ask`` returns, asked again only after ``seconds``. Any thread may call."""

    def __init__(self, ask: Callable[[], Answer], seconds: float) -> None:
        self._ask = ask
        self._seconds = seconds
        self._found: tuple[float, Answer] | None = None  # and when

    def __call__(self) -> Answer:
        now, found = time.monotonic(), self._found
        if found is None or now - found[0] >= self._seconds:
            found = self._found = now, self._ask()
        return found[1]


class Room:
    """Bytes of each tier of ``tiers`` that are free, as any process sees them. Any thread may ask.

    A GPU's driver is asked once, here: cudaMemGetInfo may wait behind a call that synchronizes, and has been seen to
    take milliseconds. What torch has taken since, torch knows without the driver; others that share the GPU are taken
    to have what they had.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._for_torch = 0  # bytes of a GPU that nobody else had
        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info(tiers.device)
            self._for_torch = free + torch.cuda.memory_reserved(tiers.device)
        self._available = Seldom(self._ask, INTERVAL)
        self._device_memory = Seldom(self._ask_torch, INTERVAL)

    def available(self, tier: Tier) -> int | None:
        """Bytes; None where that is not known."""
        return self._available().get(tier)

    def device_memory(self) -> DeviceMemoryStatus | None:
        """What torch has of a GPU's memory; None where there is none."""
        return self._device_memory()

    @property
    def _on_gpu(self) -> bool:
        return self._tiers.device.type == "cuda"

    def _on_device(self, memory: int) -> int | None:
        if self._tiers.device_is_host:
            return memory
        torch_has = self._device_memory()
        return None if torch_has is None else max(0, self._for_torch - torch_has.reserved)

    def _ask(self) -> Mapping[Tier, int | None]:
        tiers = self._tiers
        try:
            memory = available_memory()
            nvme = sum(free_by_file_system(tiers.swap.directories).values()) if tiers.swap else None
        except OSError:  # a directory that was removed: the swap files in it live on
            return {}
        return {
            Tier.DEVICE: self._on_device(memory),
            Tier.HOST: memory,
            Tier.NVME: nvme,
        }

    def _ask_torch(self) -> DeviceMemoryStatus | None:
        if not self._on_gpu:
            return None
        told = torch.cuda.memory_stats(self._tiers.device)
        return DeviceMemoryStatus(
            allocated=told.get("allocated_bytes.all.current", 0),
            peak=told.get("allocated_bytes.all.peak", 0),
            reserved=told.get("reserved_bytes.all.current", 0),
        )
