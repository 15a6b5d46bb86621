"""A slab of device memory for unsharded groups. It is allocated once, so that activations cannot fragment it.

When a lease is released, the CPU may lease its range again at once, although the device may still compute with its
bytes. Each lease is therefore released with an event behind its last use, and the next write to the range waits for
this event on its stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tiering.storage.arena import Arena, Lease
from zero3.device.storages import apart
from zero3.device.streams import Event, Streams


class DeviceSlab(Arena):
    """An arena in the memory of ``device``, with ``nbytes``."""

    def __init__(self, nbytes: int, device: torch.device, streams: Streams, name: str) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        super().__init__(memoryview(b""), self._bytes.data_ptr(), name, capacity=nbytes)
        # Released ranges, and the events after which they are unused. The first use is torch's, which fills allocated
        # memory under deterministic algorithms.
        self._uses: list[tuple[int, int, Event]] = [(0, self.capacity, streams.compute.record())]

    def tensor(self, lease: Lease) -> Tensor:
        """The bytes of ``lease``, as a tensor that is its whole storage, which another storage can exchange."""
        return apart(self._bytes[lease.offset : lease.offset + lease.nbytes])

    def beginning(self, nbytes: int) -> Tensor:
        """As ``tensor``, but without a lease: memory of this size whose bytes the caller neither reads nor writes."""
        return apart(self._bytes[:nbytes])

    def last_uses(self, lease: Lease) -> list[Event]:
        """The events that a write to ``lease`` must wait for."""
        end = lease.offset + lease.nbytes
        self._uses = [use for use in self._uses if not use[2].done()]
        return [event for start, stop, event in self._uses if start < end and lease.offset < stop]

    def release(self, lease: Lease, last_use: Event) -> None:
        """Free the range of ``lease``, whose bytes are used until ``last_use``."""
        # Before the range is free: the next lease reads from ``last_uses`` which events a write must wait for.
        self._uses.append((lease.offset, lease.offset + lease.nbytes, last_use))
        lease.release()

    def forget_memory(self) -> None:
        super().forget_memory()
        # A clone: a view, even an empty one, would keep the memory of the slab.
        self._bytes = self._bytes[:0].clone()
        self._uses.clear()
