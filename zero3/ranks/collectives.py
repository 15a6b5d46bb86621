"""Collectives of the engine: the only place that calls torch.distributed. It counts all bytes and watches all waits.

    gathers     parameters: unsharded groups, updated replicas, values that the user requests
    reductions  gradients
    control     a few numbers on which all ranks must agree, between CPUs

Each kind is a process group of its own. Operations of one group must come in the same order on every rank, those of two
groups need not. All ranks know the order of reductions beforehand. The order of gathers follows the modules that are
called: ranks agree on a gather that one of them did not foresee before it begins (see peers.py), or a rank could
receive another group's bytes.

Note [Collectives on a device]
    NCCL's operations are work of the device, in the order of its streams. Gathers and reductions have a stream each,
    of the engine: without ``async_op``, NCCL runs an operation on the current stream, and the engine's events are the
    only order. A gather waits for the copy of this rank's shard, and not for concurrent compute. A reduction waits for
    the gradients that compute has collected. Compute waits for the results that it needs. The CPU waits for none of
    them: figures of other ranks come by ``control``, between CPUs.

    NCCL keeps no reference to its tensors. The caller that begins a collective keeps their memory until its event.

    There are two communicators, so that the gather of the next block does not queue behind a large reduction. Their
    kernels occupy the device until the other ranks' kernels run, so both must fit on the device. Therefore ranks
    begin all of them in the same order, and NCCL starts them in that order (NCCL_LAUNCH_ORDER_IMPLICIT, NCCL 2.26).

Note [When a device waits for a lost rank]
    A kernel of NCCL that waits for a lost rank never ends, nor does a CPU that waits for the work behind it. So a
    thread watches the other ranks (see peers.py) and aborts the communicators. Their kernels end, with any bytes in the
    results, the CPU continues, and the next call of the engine raises the error that names the rank. torch's watchdog
    over NCCL remains. For a fault that only it notices, such as a broken network between ranks that are all alive, it
    ends the process. If both notice a fault, the engine's thread is faster: torch's takes a minute.

Note [A reduction is an exchange and a sum]
    Each rank sends every other rank the part of its gradient that the other one owns. It sums up the parts that it
    receives, in the order of ranks, in fp32, and rounds once. (W-1)/W of the gradient leaves each rank, as in any
    reduce-scatter, and the result does not depend on topology or library. gloo's own reduce-scatter sends twice as
    much.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from tiering.config.training import DistributedConfig
from tiering.errors import DistributedError
from zero3.device.streams import Event, Stream, Streams
from zero3.device.timeline import StallClock
from zero3.ranks.heartbeat import Limits
from zero3.ranks.joining import GRACE, World
from zero3.ranks.mesh import Partition
from zero3.ranks.peers import Peers
from zero3.ranks.process_groups import (
    Kind,
    Pending,
    ProcessGroups,
    all_gather,
    as_bytes,
    assert_begun,
    check_apart,
    scatter_shards,
)
from zero3.ranks.tables import Tables
from zero3.ranks.watch import Watch

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE = 256 << 10  # bytes of a shard from which on one operation for each rank is faster
EXPLAINING = 10  # steps during which an exception that the program caught is shown in later errors
CLOSE_TIMEOUT = 10.0  # seconds in which other ranks may finish transfers that use this rank's memory
_engines = itertools.count()  # engines of this process; all ranks create equally many

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}  # of parameters and gradients
KINDS: tuple[Kind, ...] = ("gather", "reduction", "control")  # of which each partition has a process group


class Collectives:
    """The collectives of one engine on ``device``. All ranks must call every method, in the same order.

    Gathers, reductions and ``tables`` are of the ranks of this one's partition, ``run_tables`` of all ranks.

    ``streams`` are the device's, None if it is the CPU. ``sent`` counts the bytes that this rank has sent, by kind,
    ``calls`` the operations. All methods raise the error of a failure that has ended the run, on any rank.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        config: DistributedConfig,
        stalls: StallClock,
        streams: Streams | None,
    ) -> None:
        self.world = world
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spared = 0  # bytes that were not sent, because a group was still gathered
        self._stalls = stalls
        self._streams = streams
        self._forward_error: BaseException | None = None  # raised by the last forward
        self._remark = ""  # about an exception of a forward that the program caught, for later errors
        self._steps_since = 0
        self._groups = ProcessGroups(streams)
        name = f"engine {next(_engines)}"
        self.peers = Peers(
            PrefixStore(f"tiering {name}", dist.distributed_c10d._get_default_store()),
            world.rank,
            world.size,
            Limits(config.timeout, config.silence),
            engine=name,
            device=None if self._streams is None else self._groups,
            place=str(world.place),
            members={
                partition.named(kind): partition.ranks
                for partition in world.place.partitions
                for kind in KINDS
            },
        )
        self._watch = Watch(self.peers)
        self._partition = world.partition
        self.tables = self._tables(self._partition, "control")
        self.run_tables = self._tables(world.all_ranks, "run") if self._partition.name else self.tables
        # An engine that is freed without close() must stop giving signs of life. At exit, peers end by themselves.
        self._disconnect = weakref.finalize(self, _disconnect, self.peers, self._groups)
        self._disconnect.atexit = False
        try:
            # torch's time-out is longer than the engine's, so that the engine's error comes first.
            self._connect(device, timedelta(seconds=config.timeout + GRACE))
        except BaseException as error:
            self.peers.fail(error)
            self._disconnect()
            raise

    def _connect(self, device: torch.device, timeout: timedelta) -> None:
        """Make and check the process groups, with the peers watching for lost ranks."""
        # Before NCCL reads it.
        if device.type == "cuda":  # see Note [Collectives on a device]
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        transport = TRANSPORTS[device.type]
        # All ranks make all groups, also those of other ranks, in one order: torch names groups by their number.
        if self.run_tables is not self.tables:
            self._groups.add("run", self._new_group(timeout, "gloo", self.world.all_ranks))
        for kind in KINDS:
            backend = "gloo" if kind == "control" else transport
            for partition in self.world.place.partitions or [self._partition]:
                group = self._new_group(timeout, backend, partition)
                if partition == self._partition:
                    self._groups.add(kind, group)
        self.peers.agree("initialize")
        if device.type == "cuda":
            gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
            # Before NCCL connects, which hangs or fails without naming the ranks.
            check_apart(self.run_tables.gather_objects(gpu, "compare the GPUs of ranks"))
        if self._streams is not None:
            self._connect_devices(device)

    def _new_group(self, timeout: timedelta, backend: str, partition: Partition) -> dist.ProcessGroup:
        make: Callable[[], dist.ProcessGroup] = partial(
            dist.new_group,
            list(partition.ranks) if partition.name else None,  # None: all ranks
            timeout=timeout,
            backend=backend,
        )
        if backend != "gloo":
            return make()  # NCCL connects later
        # gloo waits here for every rank, up to the time-out of the group.
        with self._watch.failing():
            return self.peers.follow_call(make, "new_group")

    def _tables(self, partition: Partition, kind: Kind) -> Tables:
        # Without a reference to this object, which would keep it alive.
        return Tables(
            partition,
            self.world.rank,
            partition.named("control"),
            partial(self._groups.of, kind),
            self._watch,
            self._stalls,
            partial(_count, self.sent, self.calls),
        )

    def announce(self, label: str, *, foreseen: bool) -> None:
        """The next gather is ``label``. If not all ranks have ``foreseen`` it, waits until they agree on it."""
        if foreseen:
            self.check()
            # Before the gather begins: the beats of this rank tell which gather it has reached.
            self.peers.issue(label, group=self._partition.named("gather"))
        else:
            self.agree(label)

    def gather(
        self, whole: Tensor, shard: Tensor, label: str, after: Iterable[Event] | None = None
    ) -> Pending:
        """Begin to fill the flat ``whole`` with the ``shard`` of each rank, in the order of ranks.

        ``shard`` may be this rank's part of ``whole``. The gather was announced as ``label``. A device begins it after
        the events ``after``; without them, after all work on the current stream. ``end_event`` is behind it.
        """
        self._count("all-gather", shard.nbytes * (self._partition.size - 1))
        pending = Pending([], label, "gather")
        if self._streams is not None:
            collective = partial(all_gather, whole, shard, self._groups.of("gather"), async_op=False)
            return self._queue(pending, collective, self._streams.gather, after, whole.nbytes)
        direct = shard.nbytes >= LARGE
        # The transport uses both tensors until ``finish``.
        pending.works = (
            scatter_shards(as_bytes(whole), as_bytes(shard), self._groups.of("gather"))
            if direct
            else [assert_begun(all_gather(whole, shard, self._groups.of("gather")))]
        )
        return self._trace(pending, whole.nbytes)

    def spare(self, shard_nbytes: int) -> None:
        """A group was used again before its bytes were freed: nothing is sent."""
        self.spared += shard_nbytes * (self._partition.size - 1)

    def exchange(self, received: Tensor, sent: Tensor, label: str) -> Pending:
        """Begin to send each rank its part of the flat ``sent``. ``received`` gets this rank's part from each rank.

        A device begins it after all work on the current stream. The transport uses both tensors until it has ended.
        """
        self.check()
        # The program has gone on after a forward that raised, so that ``close`` does not report its exception as the
        # end.
        self._forward_error = None
        self._count("reduce", sent.nbytes // self._partition.size * (self._partition.size - 1))
        self.peers.issue(label, group=self._partition.named("reduction"))
        pending = Pending([], label, "reduction")
        exchange = partial(dist.all_to_all_single, received, sent, group=self._groups.of("reduction"))
        if self._streams is not None:
            # NCCL keeps no reference to them.
            pending.buffers = received, sent
            return self._queue(pending, exchange, self._streams.reduce, None, sent.nbytes)
        pending.works = [assert_begun(exchange(async_op=True))]
        return self._trace(pending, sent.nbytes)

    def finish(self, pending: Pending, cause: str) -> None:
        """Wait for a collective. On a device, the current stream waits and the CPU does not. Errors name their rank."""
        if pending.end_event is not None:
            self.check()
            if not pending.end_event.done():
                self._stalls.hold(pending.end_event, cause)
            # The current stream waits, so its later uses of this memory run after the collective.
            pending.buffers = ()
            return
        with self._stalls.waiting_for(cause):
            while pending.works:
                self._watch.wait(pending.works[0], pending.label, self._partition.named(pending.group))
                # Not before the wait: a collective that failed may still write to its buffers.
                del pending.works[0]

    def gather_on_node(self, value: T) -> list[T]:
        """The ``value`` of each rank of this node, in the order of local ranks. It must be picklable."""
        hosts = self.run_tables.gather_objects(
            (socket.gethostname(), self.world.local_rank, value), "find the ranks of this node"
        )
        own_host = hosts[self.world.rank][0]
        local = sorted((local_rank, entry) for host, local_rank, entry in hosts if host == own_host)
        return [entry for _, entry in local[: self.world.local_size]]

    def agree(self, label: str) -> None:
        """Wait until all ranks are about to do ``label``. RankOrderError, on every rank, if one is not."""
        # A failure that is known is raised at once, and not at the end of a wait.
        self.check()
        with self._stalls.waiting_for("agreement"), self._watch.failing():
            self.peers.agree(label, group=self._partition.named("gather"))

    def check(self) -> None:
        """DistributedError if a failure of this rank or of another one has ended this engine."""
        self._watch.check()

    def report_failure(self, phase: str, error: BaseException) -> None:
        """``error`` ended ``phase`` on this rank: inform the other ranks.

        After a forward the program may continue. A backward or a step that not all ranks have finished ends the engine.
        """
        if phase == "forward":
            self._forward_error = error
            self._remark, self._steps_since = f"a forward that raised {type(error).__name__}: {error}", 0
            self.peers.remark(self._remark)
        else:
            self.peers.fail(error)

    def finish_step(self) -> None:
        """All ranks have finished a step: after ``EXPLAINING`` steps, an exception that was caught is forgotten."""
        if self._remark:
            self._steps_since += 1
            self._remark = self._remark if self._steps_since < EXPLAINING else ""
            self.peers.remark(self._remark and f"{self._remark} ({self._steps_since} steps before)")

    def settle(self) -> None:
        """Wait for the streams of gathers and reductions, before memory that they use is freed.

        After a failure the connections are broken first: the collectives of this rank may wait for a lost rank, and no
        other thread aborts them if the failure is this rank's own.
        """
        if self._streams is None or not self._disconnect.alive:
            return
        if self.peers.broken or self._watch.failure is not None:
            self._groups.sever()
        try:
            self._streams.gather.synchronize()
            self._streams.reduce.synchronize()
        except RuntimeError as error:  # of CUDA, which raises it from every later call; close() must continue
            log.error("the device of rank %d has failed: %s", self.world.rank, error)

    def close(self) -> None:
        """Leave the other ranks. Idempotent.

        On a device, waits up to ``CLOSE_TIMEOUT`` for the other ranks to close: they may still read its memory.
        """
        if self._forward_error is not None:
            # First: the other ranks learn the cause while this one still waits for its device.
            self.peers.fail(self._forward_error)
        # Before the groups end: collectives of this rank may still be running.
        self.settle()
        if self._disconnect.alive:
            if self._watch.failure is not None:
                self._groups.sever()
            elif self._streams is not None and not self.peers.meet("close", CLOSE_TIMEOUT):
                log.info("not all ranks have closed their engines within %.0f s of this one", CLOSE_TIMEOUT)
        self._disconnect()

    @property
    def failure(self) -> BaseException | str | None:
        """The error that ended this engine, if it was raised on this rank."""
        return self._watch.failure or self.peers.failed_by

    def _queue(
        self,
        pending: Pending,
        collective: Callable[[], object],
        stream: Stream,
        after: Iterable[Event] | None,
        nbytes: int,
    ) -> Pending:
        """Queue ``collective`` on ``stream`` of the device. See Note [Collectives on a device]."""
        assert self._streams is not None
        # Without ``after``: the tensors were written by compute, on the current stream.
        for event in [self._streams.compute.record()] if after is None else after:
            stream.wait_for(event)
        start_event = stream.record(timed=True)
        try:
            # NCCL runs a collective that is not asynchronous on the current stream, and so behind the events above.
            with stream.running():
                collective()
        except dist.DistError as error:  # a communicator that was aborted in between, or could not be made
            with self._watch.failing():
                raise self.peers.cause_of(
                    str(error), pending.label, group=self._partition.named(pending.group)
                ) from error
        pending.end_event = stream.record(timed=True)
        # Before the CPU can wait for the device: the thread that watches names what the device waits for.
        self._groups.queued(pending)
        self._stalls.timeline.add_device_span(
            "network", pending.label, start_event, pending.end_event, bytes=nbytes
        )
        return pending

    def _trace(self, pending: Pending, nbytes: int) -> Pending:
        """Record ``pending`` in a trace. A thread of the transport ends the span: no other may wait at that time."""
        timeline = self._stalls.timeline
        if timeline.recording:
            timeline.begin("network", pending.label, bytes=nbytes)
            remaining = list(pending.works)

            def count_down(_: object) -> None:
                # Threads of the transport call this: the operation is one call, which the GIL does not divide.
                remaining.pop()
                if not remaining:
                    timeline.end("network", pending.label)

            for work in pending.works:
                work.get_future().add_done_callback(count_down)
        return pending

    def is_done(self, pending: Pending) -> bool:
        """Whether ``finish`` would not have to wait."""
        # Never on a device: a collective that a rank begins for this reason would come in another order on other ranks.
        return pending.end_event is None and all(work.is_completed() for work in pending.works)

    def _connect_devices(self, device: torch.device) -> None:
        """Let every GPU send to every other one, by a gather and by an exchange, and check the results.

        NCCL makes its connections and allocates its memory now, while all ranks are here, and before the free memory of
        the device is measured. Some machines allow peer access between GPUs but deliver wrong bytes.
        """
        rank, size = self.world.partition_rank, self.world.partition_size
        own_rank = torch.full((1,), rank, dtype=torch.int32, device=device)
        sent = torch.arange(size, dtype=torch.int32, device=device) + rank * size
        whole, received = torch.empty_like(sent), torch.empty_like(sent)
        self.announce("connect the devices", foreseen=True)
        pending = (
            self.gather(whole, own_rank, "connect the devices"),
            self.exchange(received, sent, "connect the devices"),
        )
        for collective in pending:
            assert collective.end_event is not None
            # The CPU waits, so that an error of NCCL comes here and not in the first step.
            collective.end_event.wait()
            self.finish(collective, "agreement")
        if whole.tolist() != list(range(size)) or received.tolist() != [n * size + rank for n in range(size)]:
            raise DistributedError(
                f"the GPU of rank {self.world.rank} received wrong bytes from the GPUs of other ranks: {whole.tolist()}"
                f" and {received.tolist()}. Peer access between GPUs is broken (PCI access control, or an IOMMU): try"
                " NCCL_P2P_DISABLE=1"
            )

    def _count(self, kind: str, nbytes: int) -> None:
        _count(self.sent, self.calls, kind, nbytes)


def _count(sent: Counter[str], calls: Counter[str], kind: str, nbytes: int) -> None:
    calls[kind] += 1
    sent[kind] += nbytes


def _disconnect(peers: Peers, groups: ProcessGroups) -> None:
    peers.close()
    groups.leave()
