"""The process groups of one engine: torch.distributed's objects, and how they end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from tiering.errors import ConfigError
from zero3.device.streams import Event, Streams

log = logging.getLogger(__name__)

Kind = Literal["gather", "reduction", "control", "run"]
SEVERING_TAG = 0x7EE5  # a tag that no message has
SEVERING_TIMEOUT = 60.0  # seconds


def check_apart(gpus: list[tuple[str, str]]) -> None:
    """ConfigError if two ranks have the same GPU. ``gpus``: host and UUID of each rank's GPU."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same GPU of host {gpu[0]}, and NCCL needs one for each: start as"
                " many ranks on a node as it has GPUs (torchrun --nproc-per-node), with a LOCAL_RANK of its own for"
                " each, or show each rank its own GPU (CUDA_VISIBLE_DEVICES)"
            )


@dataclass
class Pending:
    """A collective that was begun as ``label``. ``Collectives.finish`` waits for it.

    On a device with streams there are no ``works``: ``end_event`` is behind the collective on its stream. NCCL keeps no
    reference to ``buffers``, so they stay here until a stream has waited for that event, or it has come.
    """

    works: list[dist.Work]
    label: str
    group: Literal["gather", "reduction"]
    end_event: Event | None = None
    buffers: tuple[Tensor, ...] = ()


class ProcessGroups:
    """The process groups of one engine, by kind, and the collectives that a device has queued. See DeviceCollectives.

    It knows nothing of ``Collectives``: the threads of ``Peers`` refer to it, and would keep that object alive.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        self._groups_by_kind: dict[Kind, dist.ProcessGroup] = {}
        # The thread that trains appends and removes; the thread that watches the device reads a copy.
        self._queued: dict[str, deque[Pending]] = {"gather": deque(), "reduction": deque()}
        self._streams = streams
        self._severing = threading.Lock()  # guards _severed, and the end of the groups
        self._severed = False

    def add(self, kind: Kind, group: dist.ProcessGroup) -> None:
        """Hold ``group`` for ``kind``. This is the only reference: its threads and sockets end with ``leave``."""
        self._groups_by_kind[kind] = group

    def of(self, kind: Kind) -> dist.ProcessGroup:
        """The group for ``kind``."""
        return self._groups_by_kind[kind]

    @property
    def _transport(self) -> list[dist.ProcessGroup]:
        return [group for kind, group in self._groups_by_kind.items() if kind in self._queued]

    def queued(self, pending: Pending) -> None:
        """The device has queued ``pending``. Forgets earlier collectives of its group that have ended."""
        queued = self._queued[pending.group]
        # First the new one, which ends the loop below.
        queued.append(pending)
        while queued[0] is not pending and _is_over(queued[0]):
            queued.popleft()

    def unended(self) -> str | None:
        """The label of the first queued collective that has not ended; None if all have. Any thread may call it."""
        if self._streams is not None:
            self._streams.enter_thread()
        # ``list`` copies a deque in one call, which the GIL does not divide: the thread that trains may change it
        # meanwhile.
        pending = (each for queued in self._queued.values() for each in list(queued))
        try:
            return next((each.label for each in pending if not _is_over(each)), None)
        except RuntimeError:  # of CUDA: the thread that uses the device gets the same error
            return None

    def abort(self, reason: str) -> None:
        """End the collectives that the device waits for, because a rank is lost: the CPU may wait for the device."""
        log.critical("%s", reason)
        self.sever()

    def sever(self) -> None:
        """Break the connections with other ranks, once. If another thread does it, waits until that has ended."""
        with self._severing:
            if not self._severed:
                self._severed = True
                sever(self._groups_by_kind.values())

    def leave(self) -> None:
        """Destroy the process groups."""
        # The thread that watches may be breaking the connections: it ends before the groups do.
        with self._severing:
            transport, remaining = self._transport, list(self._groups_by_kind.values())
            # The references below are the last ones: the threads and sockets of a group end with it.
            self._groups_by_kind.clear()
            if transport and all(group.name() == "nccl" for group in transport):
                if not self._severed:
                    # Not destroy_process_group: it waits without a limit until all ranks of this node call it.
                    sever(transport)
                else:
                    # Not at all: that would wait for torch's watchdog, which may be about to end this process.
                    remaining = [group for group in remaining if group not in transport]
        while remaining:
            with contextlib.suppress(ValueError):  # the program has destroyed all groups of torch
                dist.destroy_process_group(remaining.pop())


def _is_over(pending: Pending) -> bool:
    assert pending.end_event is not None
    return pending.end_event.done()


def scatter_shards(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """An all-gather as one scatter for each rank: all ranks send to all others at once.

    gloo's own all-gather sends around a ring, through a hidden buffer as large as ``whole``.
    """
    works = []
    # In the order of their sources on all ranks: the transport matches the operations of a group by their order.
    for rank, part in enumerate(whole.chunk(dist.get_world_size(group))):
        shards = [shard] * dist.get_world_size(group) if rank == dist.get_rank(group) else None
        # The transport reads ``shard`` and writes ``part`` until the work has ended.
        works.append(dist.scatter(part, shards, group=group, group_src=rank, async_op=True))
    return works


def all_gather(
    whole: Tensor, shard: Tensor, group: dist.ProcessGroup, *, async_op: bool = True
) -> dist.Work | None:
    """torch's all-gather into one tensor, under the name that this version has. Returns None unless ``async_op``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(as_bytes(whole), as_bytes(shard), group=group, async_op=async_op)
    return work


def assert_begun(work: dist.Work | None) -> dist.Work:
    """The handle of a collective that was begun with ``async_op``, for which torch never returns None."""
    assert work is not None
    return work


def as_bytes(values: Tensor) -> Tensor:
    """``values`` as bytes, so that the transport need not know their dtype."""
    return values.view(torch.uint8)


def sever(groups: Iterable[ProcessGroup]) -> None:
    """Break the connections of ``groups``, so that a collective that cannot end keeps no thread waiting.

    On one thread for each group, all at once: NCCL's abort of a communicator may wait for the whole device, on which
    the kernel of another communicator hangs. An abort may also never return. Then a thread that waits for the device
    hangs forever, but the calling thread continues after ``SEVERING_TIMEOUT``.
    """
    threads = [
        threading.Thread(target=_sever, args=(group,), name="sever a group of ranks", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SEVERING_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.error("connections with other ranks could not be closed within %.0f s", SEVERING_TIMEOUT)


def _sever(group: ProcessGroup) -> None:
    """Break the connections of one group.

    Gloo's ``abort`` does nothing, and its destructor waits for pending operations up to the group's time-out: minutes
    or more if another rank is frozen. But a receive that times out closes its connection, with all operations on it.
    """
    if group.name() != "gloo":
        try:
            group.abort()
        except RuntimeError as error:
            log.error("a communicator could not be aborted: %s", error)
        return
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                # Nobody sends this message: the receive times out, and takes the connection with it.
                group.recv([torch.empty(1, device="cpu")], rank, SEVERING_TAG).wait(timedelta(milliseconds=1))
