"""What a process takes of the device and of its host, and how long the device computed. None where there is no device.

Memory that torch pins for itself may or may not be in the process's VmRSS, as the driver likes. A small allocation
tells, and what does not show is added to VmHWM; memory that a program registers with CUDA is its own and always there.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from frame.process import forget_peak, resident

if TYPE_CHECKING:
    import torch

TRIED = 64 << 20  # bytes


class Meter:
    """Of a process whose device is the CPU: there is nothing to ask."""

    def facts(self) -> dict[str, Any]:
        return {}

    def settle(self) -> None:
        """Wait until the device has nothing to do."""

    def begin(self) -> None:
        """Let peaks begin anew."""
        forget_peak()

    def mark(self) -> None:
        """A place in what the device computes: calls come in pairs, around what is to be timed."""

    def read(self) -> dict[str, Any]:
        """Since ``begin``: peaks in bytes, seconds between marks; the device is idle."""
        return {
            "host": resident("VmHWM"),
            "pinned": None,
            "allocated": None,
            "reserved": None,
            "unusable": None,
            "device_allocations": None,
            "retries": None,
            "computed": None,
        }


class CudaMeter(Meter):
    """Of a process on a GPU. ``card``: the bytes it may take, of which torch's allocator takes no more."""

    def __init__(self, card: int) -> None:
        import torch

        self._torch = torch
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, card / total))
        self._shows = self._pinned_shows()
        self._marks: list[torch.cuda.Event] = []
        self._before: dict[str, int] = {}

    def facts(self) -> dict[str, Any]:
        return {"pinned_shows": self._shows}

    def settle(self) -> None:
        self._torch.cuda.synchronize()

    def begin(self) -> None:
        super().begin()
        cuda = self._torch.cuda
        cuda.reset_peak_memory_stats()
        if hasattr(cuda, "reset_peak_host_memory_stats"):
            cuda.reset_peak_host_memory_stats()
        self._marks.clear()
        self._before = cuda.memory_stats()

    def mark(self) -> None:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def read(self) -> dict[str, Any]:
        stats, before, pinned = self._torch.cuda.memory_stats(), self._before, self._pinned()
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        return {
            "host": resident("VmHWM") + (0 if self._shows else pinned or 0),
            "pinned": pinned,
            "allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.peak"],
            "unusable": stats["inactive_split_bytes.all.peak"],
            "device_allocations": stats["num_device_alloc"] - before.get("num_device_alloc", 0),
            "retries": stats["num_alloc_retries"] - before.get("num_alloc_retries", 0),
            "computed": sum(begun.elapsed_time(end) for begun, end in pairs) / 1e3,
        }

    def _pinned(self) -> int | None:
        """The most that torch itself has pinned, None where it does not say."""
        ask = getattr(self._torch.cuda, "host_memory_stats", None)
        if ask is None:
            return None
        counts = ask()
        # What it keeps for later is with the first in newer versions, and only with the second in older ones.
        return int(max(counts.get("allocated_bytes.peak", 0), counts.get("reserved_bytes.peak", 0)))

    def _pinned_shows(self) -> bool:
        """Whether VmRSS has what torch pins."""
        # What CUDA takes when it starts is not what is asked for.
        self._torch.empty(1, device="cuda").add_(1)
        self._torch.empty(1, pin_memory=True)
        self._torch.cuda.synchronize()
        before = resident("VmRSS")
        tried = self._torch.empty(TRIED, dtype=self._torch.uint8, pin_memory=True).fill_(1)
        shows = resident("VmRSS") - before > TRIED // 2
        del tried
        with contextlib.suppress(AttributeError):  # a private function
            self._torch._C._host_emptyCache()
        return shows


def meter(card: int | None) -> Meter:
    return Meter() if card is None else CudaMeter(card)
