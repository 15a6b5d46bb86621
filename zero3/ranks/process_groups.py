"""The process groups of one engine: what torch.distributed does for it, and how that ends."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero3.device.streams import Event
from zero3.ranks.peers import sever

log = logging.getLogger(__name__)

Kind = Literal["gather", "reduction", "control"]


@dataclass
class Pending:
    """A collective that was begun, and what it was for. ``collectives.finish`` waits for it.

    On a device with streams there are no ``works``: ``ended`` is behind it, and ``buffers`` stay until somebody has
    waited for that, or it has come.
    """

    works: list[dist.Work]
    what: str
    group: str
    ended: Event | None = None
    buffers: tuple[Tensor, ...] = ()


class ProcessGroups:
    """The process groups of one engine, by kind, and what a device has been told to do with those that move tensors."""

    def __init__(self) -> None:
        self._made: dict[Kind, dist.ProcessGroup] = {}
        self._queued: dict[str, deque[Pending]] = {"gather": deque(), "reduction": deque()}
        self._severing = threading.Lock()  # of what follows
        self._severed = False

    def take(self, kind: Kind, group: dist.ProcessGroup) -> None:
        """This is the group for ``kind``. Nobody else keeps it: its threads and sockets end with ``leave``."""
        self._made[kind] = group

    def of(self, kind: Kind) -> dist.ProcessGroup:
        """The group for ``kind``."""
        return self._made[kind]

    @property
    def _transport(self) -> list[dist.ProcessGroup]:
        return [group for kind, group in self._made.items() if kind != "control"]

    def queued(self, pending: Pending) -> None:
        """The device was told of it."""
        queued = self._queued[pending.group]
        queued.append(pending)
        while queued[0] is not pending and _is_over(queued[0]):
            queued.popleft()

    def unended(self) -> str | None:
        """What the device was told and has not ended, the first of it. Any thread may ask."""
        pending = (each for queued in self._queued.values() for each in list(queued))
        try:
            return next((each.what for each in pending if not _is_over(each)), None)
        except RuntimeError:  # CUDA's: whoever uses the device is told
            return None

    def abort(self, reason: str) -> None:
        """The device waits for a rank that will not come, and the CPU for the device: end what they wait for."""
        log.critical("%s", reason)
        self.sever()

    def sever(self) -> None:
        """Break the connections with other ranks, once; return when that is done, by whichever thread."""
        with self._severing:
            if not self._severed:
                self._severed = True
                sever(self._made.values())

    def leave(self) -> None:
        """Let torch forget them."""
        with self._severing:
            transport, known = self._transport, list(self._made.values())
            self._made.clear()
            if transport and all(group.name() == "nccl" for group in transport):
                if not self._severed:
                    # Not torch's way, which waits without a limit for all ranks of this node to do the same.
                    sever(transport)
                else:  # torch's own watch over them may be about to end this process, and would be waited for
                    known = [group for group in known if group not in transport]
        while known:
            with contextlib.suppress(ValueError):  # the program has destroyed all of torch's groups
                dist.destroy_process_group(known.pop())


def _is_over(pending: Pending) -> bool:
    assert pending.ended is not None
    return pending.ended.done()


def scatter_shards(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """As an all-gather, from each rank to every other one at once.

    gloo's own goes through a hidden buffer as large as the whole, and around a ring.
    """
    works = []
    for rank, part in enumerate(whole.chunk(dist.get_world_size(group))):
        shards = [shard] * dist.get_world_size(group) if rank == dist.get_rank(group) else None
        works.append(dist.scatter(part, shards, group=group, group_src=rank, async_op=True))
    return works


def all_gather(
    whole: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool = True
) -> dist.Work | None:
    """By the name that this torch has for it; None unless ``async_op``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(as_bytes(whole), as_bytes(shard), group=group, async_op=async_op)
    return work


def waited_for(work: dist.Work | None) -> dist.Work:
    """What was begun with ``async_op``: it is there."""
    assert work is not None
    return work


def as_bytes(values: Tensor) -> Tensor:
    """As bytes: copied as they are, whatever dtypes the transport knows."""
    return values.view(torch.uint8)
