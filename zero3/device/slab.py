"""A slab of device memory in which groups are unsharded: allocated once, so that what comes and goes cannot cut it up.

Its room is free for the CPU as soon as a lease is released, while the device may still compute with what is there: each
lease is released with an event behind its last use, and whoever writes to the room next waits for that, on its stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiering.storage.arena import Arena, Lease
from zero3.device.storage_swap import apart
from zero3.device.streams import Event, Streams


class DeviceSlab(Arena):
    """An arena over ``nbytes`` of the memory of ``device``."""

    def __init__(self, nbytes: int, device: torch.device, streams: Streams, name: str) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        super().__init__(memoryview(b""), self._bytes.data_ptr(), name, capacity=nbytes)
        # Ranges that were released, and when they are not used any more. The first use is torch's, which fills what it
        # allocates under deterministic algorithms.
        self._uses: list[tuple[int, int, Event]] = [(0, self.capacity, streams.compute.record())]

    def tensor(self, lease: Lease) -> Tensor:
        """The bytes of ``lease``: a tensor that begins with its storage, so that a storage can take them over."""
        return apart(self._bytes[lease.offset : lease.offset + lease.nbytes])

    def beginning(self, nbytes: int) -> Tensor:
        """As ``tensor``, of bytes that nobody has leased, for who needs memory of that size and does not touch it."""
        return apart(self._bytes[:nbytes])

    def last_uses(self, lease: Lease) -> list[Event]:
        """What has to be over before ``lease`` is written to."""
        end = lease.offset + lease.nbytes
        self._uses = [use for use in self._uses if not use[2].done()]
        return [event for start, stop, event in self._uses if start < end and lease.offset < stop]

    def release(self, lease: Lease, last_use: Event) -> None:
        """Give the room back; what is there is used until ``last_use``."""
        # Before the room is free: whoever leases it next asks ``last_uses`` which events come before a write to it.
        self._uses.append((lease.offset, lease.offset + lease.nbytes, last_use))
        lease.release()

    def forget_memory(self) -> None:
        super().forget_memory()
        # A clone: a view, even an empty one, would keep the memory of the slab.
        self._bytes = self._bytes[:0].clone()
        self._uses.clear()
