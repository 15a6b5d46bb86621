"""Figures that are measured less often than they are published: free memory on the tiers, and torch's on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from tiering.placement.budgets import available_memory
from tiering.placement.workload import Tier
from tiering.storage.swap_file import free_by_file_system
from tiering.telemetry import DeviceMemoryStatus
from zero3.device.tiers import Tiers

# Seconds for which a value is returned again.
INTERVAL = 2.0

Value = TypeVar("Value")


class RateLimited(Generic[Value]):
    """Calls ``measure`` at most once in ``seconds``, and returns its last value. Any thread may call."""

    def __init__(self, measure: Callable[[], Value], seconds: float) -> None:
        self._measure = measure
        self._seconds = seconds
        # The time of the last measurement, and its value.
        self._last: tuple[float, Value] | None = None

    def __call__(self) -> Value:
        now, last = time.monotonic(), self._last
        if last is None or now - last[0] >= self._seconds:
            last = self._last = now, self._measure()
        return last[1]


class FreeMemory:
    """Free bytes on each tier of ``tiers``, as any process sees them. Any thread may call.

    The GPU's driver is called once, at construction: cudaMemGetInfo may wait for a call that synchronizes, and has
    taken milliseconds. Later figures use what torch has reserved since, which torch counts without the driver; other
    processes on the GPU are assumed to use as much as they did then.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        # Bytes of a GPU that torch had, or that were free.
        self._for_torch = 0
        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info(tiers.device)
            self._for_torch = free + torch.cuda.memory_reserved(tiers.device)
        self._available = RateLimited(self._measure, INTERVAL)
        self._device_memory = RateLimited(self._measure_torch, INTERVAL)

    def available(self, tier: Tier) -> int | None:
        """Free bytes on ``tier``; None if that is unknown."""
        return self._available().get(tier)

    def device_memory(self) -> DeviceMemoryStatus | None:
        """Torch's use of a GPU's memory; None without a GPU."""
        return self._device_memory()

    @property
    def _on_gpu(self) -> bool:
        return self._tiers.device.type == "cuda"

    def _on_device(self, memory: int) -> int | None:
        if self._tiers.device_is_host:
            return memory
        torch_memory = self._device_memory()
        return None if torch_memory is None else max(0, self._for_torch - torch_memory.reserved)

    def _measure(self) -> Mapping[Tier, int | None]:
        tiers = self._tiers
        try:
            memory = available_memory()
            nvme = sum(free_by_file_system(tiers.swap.directories).values()) if tiers.swap else None
        except OSError:
            # A directory was removed; the swap files in it still exist.
            return {}
        return {
            Tier.DEVICE: self._on_device(memory),
            Tier.HOST: memory,
            Tier.NVME: nvme,
        }

    def _measure_torch(self) -> DeviceMemoryStatus | None:
        if not self._on_gpu:
            return None
        stats = torch.cuda.memory_stats(self._tiers.device)
        return DeviceMemoryStatus(
            allocated=stats.get("allocated_bytes.all.current", 0),
            peak=stats.get("allocated_bytes.all.peak", 0),
            reserved=stats.get("reserved_bytes.all.current", 0),
        )
