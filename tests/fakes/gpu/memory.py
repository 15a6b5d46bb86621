"""Which memory is what: the device's, pinned, or the CPU's alone. All of it is the CPU's here, so addresses tell."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from enum import Enum

import torch

from .order import Agent, Clock


class Kind(Enum):
    DEVICE = "device"
    PINNED = "pinned"  # host memory that the device copies from and to while the CPU goes on
    PAGEABLE = "host"


@dataclass(eq=False)
class Region:
    """An allocation. ``owner`` is the stream it was made for.

    ``kept`` is what may be under way there when it is freed. ``movable`` is host memory of the script's own, which it
    would have put on a real device.
    """

    start: int
    end: int
    kind: Kind
    what: str
    owner: Agent | None = None
    movable: bool = False
    kept: Clock = field(default_factory=dict)


def address_of(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """Where it begins; 0 if its storage is closed (zero3/device/storages.py): then no operation reads it."""
    try:
        return memory.data_ptr()
    except RuntimeError:
        return 0


class Regions:
    """The allocations that there are."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []

    def at(self, address: int) -> Region | None:
        """The one that holds ``address``."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._regions[index].end:
            return None
        return self._regions[index]

    def add(self, region: Region) -> None:
        """A new one, in place of whatever was there."""
        first = bisect_right(self._starts, region.start) - 1
        if first < 0 or self._regions[first].end <= region.start:
            first += 1
        last = bisect_left(self._starts, region.end)
        self._starts[first:last] = [region.start]
        self._regions[first:last] = [region]

    def remove(self, region: Region) -> None:
        """It is no more, unless another has taken its place already."""
        index = bisect_left(self._starts, region.start)
        if index < len(self._regions) and self._regions[index] is region:
            del self._starts[index], self._regions[index]
